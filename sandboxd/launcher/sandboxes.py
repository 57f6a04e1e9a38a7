"""The table of sandboxes: making one, ending one, and what happens when one dies by itself.

Making one, in this order (each step undone if a later one fails):
  1. its cgroups, with their limits;
  2. PID 1, cloned by the zygote straight into its cgroup2 directory; id maps are written then;
  3. M_SETUP: PID 1 joins the v1 cgroups, then unshares the cgroup namespace (the other way round
     /proc/self/cgroup would show where it stands), mounts, masks, locks itself up. Meanwhile the
     mounter makes the root;
  4. the undertaker is given the root's descriptors, before PID 1 has the only other one;
  5. M_ROOT: PID 1 swaps its root;
  6. M_ATTACH: a control socket for the daemon.

Ending one: SIGKILL to PID 1; its pidfd is readable once no process of its pid namespace is left.
Then it is answered; the rest (roots, cgroups) is taken down behind that.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from sandboxd.errors import (
    ImageUnavailable,
    NodeError,
    SandboxdError,
    SandboxExists,
    SandboxLost,
    SandboxSetupError,
)
from sandboxd.launcher.cgroups import NodeCgroups, SandboxCgroups, make
from sandboxd.launcher.images import Images, MountedImage
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.pid1 import Pid1, Zygote
from sandboxd.launcher.protocol import SandboxRow
from sandboxd.launcher.worker import Worker
from sandboxd.model import Limits, SandboxState
from sandboxd.rootfs import skeleton

ROOT_TIMEOUT_S: Final = 10.0
DEATH_TIMEOUT_S: Final = 60.0
"""A killed pid namespace lasts as long as its longest uninterruptible process; those that wait for
a FUSE server are freed when the watch kills it, after CHECK_EVERY_S + CHECK_TIMEOUT_S."""
CGROUP_REMOVAL_S: Final = 10.0


@dataclass(slots=True)
class Sandbox:
    id: str
    meta: dict[str, Any]
    images: tuple[MountedImage, ...]
    state: SandboxState = SandboxState.CREATING
    pid: int = 0
    pidfd: int = -1
    pid1: Pid1 | None = None
    cgroups: SandboxCgroups | None = None
    reason: str = ""
    """Why it died, where it did so by itself."""
    dead: Promise[None] = field(default_factory=Promise)
    deleting: Promise[Any] | None = None


class Sandboxes:
    def __init__(
        self,
        loop: Loop,
        *,
        zygote: Zygote,
        images: Images,
        mounter: Worker,
        undertaker: Worker,
        cgroups: NodeCgroups,
        on_death: Callable[[Sandbox], None],
    ) -> None:
        self._loop = loop
        self._zygote = zygote
        self._images = images
        self._mounter = mounter
        self._undertaker = undertaker
        self._cgroups = cgroups
        self._on_death = on_death
        self._masked = skeleton.masked_paths(os.cpu_count() or 1)
        self.by_id: dict[str, Sandbox] = {}
        self.in_teardown = 0
        """Deleted and answered for, but with roots or cgroups still to be taken down."""

    def create(self, request: dict[str, Any]) -> Task[tuple[Sandbox, dict[str, float], int]]:
        """Make a sandbox; returns it, the milliseconds of each phase, and a control socket's fd.

        Raises SandboxExists, ImageUnavailable, SandboxSetupError, SandboxLost.
        """
        name = request["sandbox"]
        if name in self.by_id:
            raise SandboxExists(f"there is a sandbox {name}")
        images = tuple(self._mounted(key) for key in request["images"])
        sandbox = Sandbox(name, request["meta"], images)
        self.by_id[name] = sandbox
        for image in images:
            image.sandboxes.add(name)
        try:
            phases = yield from self._build(
                sandbox, Limits(**request["limits"]), request["hostname"]
            )
            control = yield from self.attach(sandbox)
        except (OSError, TimeoutError, SandboxdError) as error:
            self._kill(sandbox)
            self._loop.spawn(self._take_down(sandbox))
            if isinstance(error, SandboxdError):
                raise
            if sandbox.reason == "image-lost":
                raise ImageUnavailable("the image's server died") from error
            if isinstance(error, TimeoutError):
                for image in images:
                    self._loop.spawn(self._images.suspect(image))
                raise NodeError(f"{error} took too long") from error
            raise SandboxSetupError(f"the sandbox could not be made: {error}") from error
        sandbox.state = SandboxState.RUNNING
        return sandbox, phases, control

    def _mounted(self, key: str) -> MountedImage:
        image = self._images.by_key.get(key)
        if image is None or not image.ready.settled or image.ready.error:
            raise ImageUnavailable("the image is not mounted")
        return image

    def _build(self, sandbox: Sandbox, limits: Limits, hostname: str) -> Task[dict[str, float]]:
        clock = _Clock()
        sandbox.cgroups = make(self._cgroups, sandbox.id, limits)
        cgroup_fds = sandbox.cgroups.open_for_pid1()
        clock.lap("cgroups")
        # Asked for before anything is waited for: it is made while PID 1 sets itself up.
        root = self._mounter.request(
            "root",
            lowers=[image.name for image in reversed(sandbox.images)],
            size_bytes=limits.disk_mb * 1024 * 1024,
            inodes=limits.inodes,
        )
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sandbox.pid1 = Pid1(self._loop, ours)
            with theirs:
                sandbox.pid, sandbox.pidfd = yield from self._zygote.clone(theirs, cgroup_fds[0])
            self._loop.add_reader(sandbox.pidfd, lambda: self._died(sandbox))
            clock.lap("clone")
            done = sandbox.pid1.set_up(hostname, limits, cgroup_fds, self._masked)
            yield from sandbox.pid1.check(done, "set-up")
            clock.lap("setup")
        except BaseException:
            root.watch(lambda: _close_fds(root))
            raise
        finally:
            for fd in cgroup_fds:
                os.close(fd)
        reply = yield from self._loop.wait(root, ROOT_TIMEOUT_S, "mounting the root")
        overlay_fd = reply.fds[0]
        clock.lap("root")
        try:
            self._undertaker.request("hold", tuple(reply.fds), sandbox=sandbox.id)
            yield from sandbox.pid1.check(sandbox.pid1.take_root(overlay_fd), "root swap")
        finally:
            for fd in reply.fds:
                os.close(fd)
        clock.lap("pivot")
        return clock.laps

    def attach(self, sandbox: Sandbox) -> Task[int]:
        """A new control socket to the sandbox's PID 1; the caller closes its fd once passed on."""
        if sandbox.pid1 is None or sandbox.dead.settled:
            raise SandboxLost("the sandbox is dead", reason=sandbox.reason)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            done = sandbox.pid1.attach(theirs)
        try:
            yield from sandbox.pid1.check(done, "attach")
        except BaseException:
            ours.close()
            raise
        return ours.detach()

    def delete(self, name: str) -> Task[None]:
        """End a sandbox; returns when no process of it lives. Not having it is no error."""
        sandbox = self.by_id.get(name)
        if sandbox is None:
            return
        if sandbox.deleting is None:
            sandbox.state = SandboxState.DELETING
            sandbox.deleting = self._loop.spawn(self._end(sandbox))
        yield sandbox.deleting

    def _end(self, sandbox: Sandbox) -> Task[None]:
        self._kill(sandbox)
        try:
            yield from self._loop.wait(sandbox.dead, DEATH_TIMEOUT_S, "the death of PID 1")
        except TimeoutError as error:
            sandbox.deleting = None
            raise NodeError("a process of the sandbox cannot be killed yet") from error
        self._loop.spawn(self._take_down(sandbox))

    def _kill(self, sandbox: Sandbox) -> None:
        if sandbox.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)
        else:
            sandbox.dead.resolve(None)

    def _died(self, sandbox: Sandbox) -> None:
        """PID 1 is dead, and so is everything that was in its pid namespace."""
        self._loop.remove_reader(sandbox.pidfd)
        os.close(sandbox.pidfd)
        sandbox.pidfd = -1
        if sandbox.pid1 is not None:
            sandbox.pid1.close()
        expected = sandbox.state is SandboxState.DELETING
        if not expected:
            sandbox.state = SandboxState.FAILED
            sandbox.reason = sandbox.reason or self._reason(sandbox)
        sandbox.dead.resolve(None)
        if not expected:
            self._on_death(sandbox)

    @staticmethod
    def _reason(sandbox: Sandbox) -> str:
        with suppress(OSError):
            if sandbox.cgroups is not None and sandbox.cgroups.oom_kills():
                return "oom-killed"
        return "exited"

    def _take_down(self, sandbox: Sandbox) -> Task[None]:
        """What is left of a sandbox once its processes are dead; its id is free from here on."""
        self.in_teardown += 1
        try:
            yield from self._loop.wait(sandbox.dead, DEATH_TIMEOUT_S, "the death of PID 1")
            self.by_id.pop(sandbox.id, None)
            if sandbox.pid1 is not None:
                sandbox.pid1.close()
            for image in sandbox.images:
                image.sandboxes.discard(sandbox.id)
            self._undertaker.request("drop", sandbox=sandbox.id)
            deadline = time.monotonic() + CGROUP_REMOVAL_S
            while sandbox.cgroups is not None:
                try:
                    sandbox.cgroups.remove(time.monotonic())
                    sandbox.cgroups = None
                except OSError as error:
                    if time.monotonic() > deadline:
                        print(f"{sandbox.id}: cgroup left behind: {error}", file=sys.stderr)
                        return
                # A v1 cgroup tells nobody that its last, dying task has left it.
                yield from self._loop.sleep(0.01)
        finally:
            self.in_teardown -= 1

    def image_lost(self, image: MountedImage) -> None:
        """The image's server died: end its sandboxes at once, before a command in one of them makes
        a result out of reads that failed."""
        for name in list(image.sandboxes):
            sandbox = self.by_id.get(name)
            if sandbox is not None and sandbox.state in (
                SandboxState.CREATING,
                SandboxState.RUNNING,
            ):
                sandbox.reason = "image-lost"
                self._kill(sandbox)

    def rows(self) -> list[SandboxRow]:
        """All that can be adopted or deleted, by id."""
        return [
            SandboxRow(s.id, s.pid, str(s.state), tuple(image.key for image in s.images), s.meta)
            for s in sorted(self.by_id.values(), key=lambda s: s.id)
            if s.state is not SandboxState.CREATING
        ]


class _Clock:
    """Milliseconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round((now - self._last) * 1000, 3)
        self._last = now


def _close_fds(reply: Promise[Any]) -> None:
    if reply.error is None and reply.value is not None:
        for fd in reply.value.fds:
            os.close(fd)
