"""The table of sandboxes: making one, ending one, and what happens when one dies by itself.

Making one, in this order (each step undone if a later one fails):
  1. the mounter is asked for a root; meanwhile
  2. a slot is taken from the pool, or made, and given its limits;
  3. the undertaker is given the root's descriptors, before PID 1 has the only other one;
  4. M_ROOT: PID 1 swaps its root.

Ending one: SIGKILL to PID 1; its pidfd is readable once no process of its pid namespace is left.
Then it is answered; the rest (roots, cgroups) is taken down behind that.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.errors import (
    ImageUnavailable,
    NodeError,
    SandboxdError,
    SandboxExists,
    SandboxLost,
    SandboxSetupError,
)
from sandboxd.launcher.images import Images, MountedImage
from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.protocol import SandboxRow
from sandboxd.launcher.slots import Slot, Slots
from sandboxd.launcher.worker import Worker
from sandboxd.model import Limits, SandboxState
from sandboxd.rootfs import skeleton

_SERVER_DIED: Final = {errno.ENOTCONN, errno.ECONNABORTED}
"""What a mount above an image says whose server has died, before its death is noticed."""

ROOT_TIMEOUT_S: Final = 10.0
DEATH_TIMEOUT_S: Final = 60.0
"""A killed pid namespace lasts as long as its longest uninterruptible process; those that wait for
a FUSE server are freed when the watch kills it, after CHECK_EVERY_S + CHECK_TIMEOUT_S."""


@dataclass(slots=True)
class Sandbox:
    id: str
    meta: dict[str, Any]
    images: tuple[MountedImage, ...]
    state: SandboxState = SandboxState.CREATING
    slot: Slot | None = None
    reason: str = ""
    """Why it died, where it did so by itself."""
    deleting: Promise[Any] | None = None


class Sandboxes:
    def __init__(
        self,
        loop: Loop,
        *,
        slots: Slots,
        images: Images,
        mounter: Lanes,
        undertaker: Worker,
        on_death: Callable[[Sandbox], None],
    ) -> None:
        self._loop = loop
        self._slots = slots
        self._images = images
        self._mounter = mounter
        self._undertaker = undertaker
        self._on_death = on_death
        self.by_id: dict[str, Sandbox] = {}

    def create(self, request: dict[str, Any]) -> Task[tuple[Sandbox, dict[str, float], int]]:
        """Make a sandbox; returns it, the milliseconds of each phase, and a control socket's fd.

        Raises SandboxExists, ImageUnavailable, SandboxSetupError, SandboxLost, NodeError.
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
            if sandbox.reason == "image-lost":
                # It died while there was no PID 1 yet that could have been killed for it.
                raise ImageUnavailable("the image's server died")
        except (OSError, TimeoutError, SandboxdError) as error:
            # Its id is free again when this is answered: who asks may ask anew.
            with suppress(TimeoutError):
                yield from self._loop.wait(
                    self._take_down(sandbox), DEATH_TIMEOUT_S, "the death of PID 1"
                )
            if isinstance(error, SandboxdError):
                raise
            if sandbox.reason == "image-lost" or (
                isinstance(error, OSError) and error.errno in _SERVER_DIED
            ):
                raise ImageUnavailable("the image's server died") from error
            if isinstance(error, TimeoutError):
                for image in images:
                    self._loop.spawn(self._images.suspect(image))
                raise NodeError(f"{error} took too long") from error
            raise SandboxSetupError(f"the sandbox could not be made: {error}") from error
        assert sandbox.slot is not None
        assert sandbox.slot.control is not None
        control, sandbox.slot.control = sandbox.slot.control, None
        sandbox.state = SandboxState.RUNNING
        return sandbox, phases, control.detach()

    def _mounted(self, key: str) -> MountedImage:
        image = self._images.by_key.get(key)
        if image is None or not image.ready.settled or image.ready.error:
            raise ImageUnavailable("the image is not mounted")
        return image

    def _build(self, sandbox: Sandbox, limits: Limits, hostname: str) -> Task[dict[str, float]]:
        clock = _Clock()
        # Asked for before anything is waited for: it is made while a slot is limited, or made.
        lowers = [image.name for image in reversed(sandbox.images)]
        root = self._mounter.request(
            "root",
            lanes=tuple(lowers),
            lowers=lowers,
            size_bytes=limits.disk_mb * 1024 * 1024,
            inodes=limits.inodes,
        )
        try:
            slot = self._slots.take() if limits.shm_mb == skeleton.SHM_MB else None
            if slot is None:
                slot = yield from self._slots.make(limits.shm_mb)
            sandbox.slot = slot
            slot.on_death = lambda: self._died(sandbox)
            clock.lap("slot")
            slot.cgroups.limit(limits)
            clock.lap("limits")
            reply = yield from self._loop.wait(root, ROOT_TIMEOUT_S, "mounting the root")
            clock.lap("root")
        except BaseException:
            # Also one that comes when nobody waits any more.
            root.abandon()
            raise
        try:
            self._undertaker.request("hold", tuple(reply.fds), sandbox=sandbox.id)
            done = slot.pid1.take_root(
                reply.fds[0], hostname if hostname != skeleton.HOSTNAME else None
            )
        finally:
            _close_fds(root)
        yield from slot.pid1.check(done, "root swap")
        clock.lap("pivot")
        return clock.laps

    def attach(self, sandbox: Sandbox) -> Task[int]:
        """A new control socket to the sandbox's PID 1; the caller closes its fd once passed on."""
        if sandbox.slot is None or sandbox.state is not SandboxState.RUNNING:
            raise SandboxLost("the sandbox is dead", reason=sandbox.reason)
        control = yield from self._slots.attach(sandbox.slot)
        return control.detach()

    def delete(self, name: str) -> Task[None]:
        """End a sandbox; returns when no process of it lives. Not having it is no error."""
        sandbox = self.by_id.get(name)
        if sandbox is None:
            return
        if sandbox.deleting is None:
            sandbox.state = SandboxState.DELETING
            sandbox.deleting = self._take_down(sandbox)
        try:
            yield from self._loop.wait(sandbox.deleting, DEATH_TIMEOUT_S, "the death of PID 1")
        except TimeoutError as error:
            raise NodeError("a process of the sandbox cannot be killed yet") from error

    def _take_down(self, sandbox: Sandbox) -> Promise[Any]:
        """Kill a sandbox and let go of it; the promise is settled when no process of it lives."""

        def steps() -> Task[None]:
            if sandbox.slot is not None:
                sandbox.slot.kill()
                yield sandbox.slot.dead
                self._slots.discard(sandbox.slot)
            self.by_id.pop(sandbox.id, None)
            for image in sandbox.images:
                image.sandboxes.discard(sandbox.id)
            self._undertaker.request("drop", sandbox=sandbox.id)

        return self._loop.spawn(steps())

    def _died(self, sandbox: Sandbox) -> None:
        if sandbox.state is SandboxState.DELETING:
            return
        told = sandbox.state is SandboxState.RUNNING
        sandbox.state = SandboxState.FAILED
        sandbox.reason = sandbox.reason or self._reason(sandbox)
        if told:
            self._on_death(sandbox)

    def _reason(self, sandbox: Sandbox) -> str:
        if self._slots.zygote_dead:
            return "node-lost"  # no sandbox's doing, and all of them end with it
        with suppress(OSError):
            if sandbox.slot is not None and sandbox.slot.cgroups.oom_kills():
                return "oom-killed"
        return "exited"

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
                if sandbox.slot is not None:
                    sandbox.slot.kill()

    def rows(self) -> list[SandboxRow]:
        """All that can be adopted or deleted, by id."""
        return [
            SandboxRow(
                s.id,
                s.slot.pid if s.slot else 0,
                str(s.state),
                tuple(image.key for image in s.images),
                s.meta,
                s.reason,
            )
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
