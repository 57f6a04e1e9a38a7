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
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sandboxd.errors import (
    ImageUnavailable,
    NodeError,
    SandboxBusy,
    SandboxdError,
    SandboxExclusive,
    SandboxExists,
    SandboxLost,
    SandboxNotFound,
    SandboxRunning,
    SandboxSetupError,
    SnapshotTooDeep,
)
from sandboxd.host.client import HostClient
from sandboxd.init.protocol import RootFlag
from sandboxd.launcher.host_mounts import Opened, open_all
from sandboxd.launcher.images import Images, MountedImage
from sandboxd.launcher.layers import Layers, Stack
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.network import Attachment, Networks
from sandboxd.launcher.primer import Primer
from sandboxd.launcher.protocol import SandboxRow
from sandboxd.launcher.roots import Fill, Root, Roots
from sandboxd.launcher.slots import Outfit, Slot, Slots
from sandboxd.launcher.views import Views
from sandboxd.model import Limits, SandboxState
from sandboxd.rootfs import skeleton

T = TypeVar("T")

DEPTH_MAX: Final = 32
"""Layers below a sandbox's own. OverlayFS takes 500; each costs look-ups of what is not there."""

SERVER_DIED: Final = {errno.ENOTCONN, errno.ECONNABORTED}
"""What a mount above an image says whose server has died, before its death is noticed."""

DEATH_TIMEOUT_S: Final = 60.0
"""A killed pid namespace lasts as long as its longest uninterruptible process; those that wait for
a FUSE server are freed when the watch kills it, after CHECK_EVERY_S + CHECK_TIMEOUT_S."""

ZYGOTE_S: Final = 0.01
"""For the zygote's end to be seen after that of a PID 1 which died with it."""


@dataclass(eq=False, slots=True)
class Sandbox:
    id: str
    meta: dict[str, Any]
    limits: Limits
    hostname: str
    images: tuple[str, ...]
    """Keys, lowest first."""
    network: dict[str, Any] | None = None
    """What ``Networks.attach`` takes, where it has more than a loopback."""
    attachment: Attachment | None = None
    state: SandboxState = SandboxState.CREATING
    slot: Slot | None = None
    root: Root | None = None
    reason: str = ""
    """Why it died, where it did so by itself."""
    changing: Promise[Any] | None = None
    """A reset or snapshot under way: one at a time, and a delete waits for it."""
    deleting: Promise[Any] | None = None
    filter: bytes = b""
    """One more seccomp program for its commands, on top of the one that all sandboxes have."""
    paused: bool = False
    mounts: tuple[dict[str, Any], ...] = ()
    """Files of the host, as ``host_mounts.open_all`` takes them."""
    places: tuple[dict[str, Any], ...] = ()
    """What those go over, in every root."""
    mapped: tuple[bool, ...] = ()
    exclusive: bool = False
    """One command has it to itself: nothing else is started (``exclusive.py``)."""


class Sandboxes:
    def __init__(
        self,
        loop: Loop,
        *,
        slots: Slots,
        images: Images,
        roots: Roots,
        layers: Layers,
        primer: Primer,
        views: Views,
        networks: Networks,
        host: HostClient,
        on_death: Callable[[Sandbox], None],
    ) -> None:
        self._loop = loop
        self._primer = primer
        self._slots = slots
        self._images = images
        self._roots = roots
        self._layers = layers
        self._views = views
        self.networks = networks
        self._host = host
        self._on_death = on_death
        self.by_id: dict[str, Sandbox] = {}

    def find(self, name: str) -> Sandbox:
        sandbox = self.by_id.get(name)
        if sandbox is None:
            raise SandboxNotFound(f"no sandbox {name}")
        return sandbox

    def create(
        self,
        request: dict[str, Any],
        stack: Stack,
        *,
        fill: Fill | None = None,
        program: bytes = b"",
    ) -> Task[tuple[Sandbox, dict[str, float], int]]:
        """Make a sandbox on a stack: itself, milliseconds by phase, a control socket's fd.

        Raises SandboxExists, ImageUnavailable, DiskFull, SandboxSetupError, SandboxLost, NodeError,
        and what ``fill`` raises.
        """
        name = request["sandbox"]
        if name in self.by_id:
            raise SandboxExists(f"there is a sandbox {name}")
        mounted = [self._images.mounted(key) for key in stack.images]
        sandbox = Sandbox(
            name,
            request["meta"],
            Limits(**request["limits"]),
            request["hostname"],
            stack.images,
            filter=program,
            network=request.get("network"),
            mounts=tuple(request.get("mounts") or ()),
        )
        self.by_id[name] = sandbox
        for image in mounted:
            image.sandboxes.add(name)
        try:
            phases = yield from self.give_root(sandbox, stack, fill)
            if sandbox.reason == "image-lost":
                # It died while there was no PID 1 yet that could have been killed for it.
                raise ImageUnavailable("the image's server died")
        except (OSError, TimeoutError, SandboxdError) as error:
            # Its id is free again when this is answered: who asks may ask anew.
            with suppress(TimeoutError):
                down = self._take_down(sandbox)
                yield from self._loop.wait(down, DEATH_TIMEOUT_S, "the death of PID 1")
            raise self._failure(sandbox, error) from error
        sandbox.state = SandboxState.RUNNING
        return sandbox, phases, self._control(sandbox)

    def give_root(
        self, sandbox: Sandbox, stack: Stack, fill: Fill | None = None
    ) -> Task[dict[str, float]]:
        """A slot with a fresh root on ``stack`` becomes the sandbox's; milliseconds by phase."""
        clock = _Clock()
        names = [self._images.mounted(key).name for key in stack.images]
        limits = sandbox.limits
        # A root that is there already is one that somebody could run in: nothing is put into it,
        # and the name server would have to be.
        plain = not (stack.layers or fill or sandbox.network or sandbox.mounts)
        outfit = Outfit(tuple(names), limits) if plain else None
        slot = self._slots.take(outfit) if limits.shm_mb == skeleton.SHM_MB else None
        self._layers.share(stack.layers)
        try:
            primed = slot is not None and slot.root is not None and slot.outfit == outfit
            if slot is not None and primed and sandbox.hostname == skeleton.HOSTNAME:
                sandbox.slot, sandbox.root, slot.root = slot, slot.root, None
                slot.on_death = lambda: self._died(sandbox)
                clock.lap("slot")
                self._views.tell(slot, limits)
                clock.lap("views")
            else:
                yield from self._dress(sandbox, stack, names, slot, clock, fill=fill)
            if sandbox.filter:
                assert sandbox.slot is not None
                taken = sandbox.slot.pid1.take_filter(sandbox.filter)
                yield from sandbox.slot.pid1.check(taken, "the sandbox's filter")
        except BaseException:
            self._layers.release(stack.layers)
            raise
        if outfit is not None:
            self._primer.wanted(outfit, stack)
        return clock.laps

    def _dress(
        self,
        sandbox: Sandbox,
        stack: Stack,
        names: Sequence[str],
        slot: Slot | None,
        clock: _Clock,
        *,
        fill: Fill | None,
    ) -> Task[None]:
        """Give a slot, made now if there is none, the sandbox's limits and root."""
        # Asked for before anything is waited for: it is made while a slot is limited, or made.
        resolv = self.networks.resolv_conf if sandbox.network else None
        asked = self._roots.ask(stack, names, sandbox.limits, resolv=resolv)
        opened: Opened | None = None
        try:
            if sandbox.mounts:
                opened = yield from open_all(self._host, sandbox.mounts)
                sandbox.places, sandbox.mapped = opened.places(), opened.mapped
                clock.lap("mounts")
            if slot is None:
                slot = yield from self._slots.make(sandbox.limits.shm_mb)
            sandbox.slot = slot
            slot.on_death = lambda: self._died(sandbox)
            clock.lap("slot")
            slot.cgroups.limit(sandbox.limits)
            clock.lap("limits")
            self._views.tell(slot, sandbox.limits)
            clock.lap("views")
        except BaseException:
            self._roots.forget(asked)
            if opened is not None:
                opened.close()
            if slot is not None and sandbox.slot is None:
                slot.kill()
                self._slots.discard(slot)
            raise
        linked: Promise[Attachment] | None = None
        if sandbox.network is not None:
            # Made while the root is: neither needs the other.
            linked = self._loop.spawn(self.networks.attach(slot, sandbox.network))
        hostname = sandbox.hostname if sandbox.hostname != skeleton.HOSTNAME else None
        try:
            sandbox.root = yield from self._roots.put(
                slot,
                stack,
                asked,
                hostname=hostname,
                fill=fill,
                names=names,
                places=sandbox.places,
                mounts=opened.pairs() if opened is not None else (),
            )
        except BaseException:
            self._unlink(linked)
            raise
        finally:
            if opened is not None:
                opened.close()
        if slot.root is not None:
            # Primed for somebody else.
            self._roots.drop(slot.root)
            slot.root = None
        clock.lap("root")
        if fill is not None:
            clock.laps["copy"] = sandbox.root.filled["ms"]
        if linked is not None:
            try:
                sandbox.attachment = yield linked
            except BaseException:
                # As a root that could not be put in place: the stack's layers are the caller's.
                root, sandbox.root = sandbox.root, None
                self._roots.drop_overlay(root)
                self._layers.release((root.upper,))
                raise
            clock.lap("network")

    def _unlink(self, linked: Promise[Attachment] | None) -> None:
        """Take away a link that is being made, once it is."""
        if linked is not None:
            linked.watch(lambda: self.networks.detach(linked.value))

    def _control(self, sandbox: Sandbox) -> int:
        """The control socket that came with the slot."""
        assert sandbox.slot is not None
        assert sandbox.slot.control is not None
        control, sandbox.slot.control = sandbox.slot.control, None
        return control.detach()

    def _failure(self, sandbox: Sandbox, error: BaseException) -> SandboxdError:
        """What a set-up that ended with ``error`` is called."""
        died = isinstance(error, OSError) and error.errno in SERVER_DIED
        if died or sandbox.reason == "image-lost":
            return ImageUnavailable("the image's server died")
        if isinstance(error, SandboxdError):
            return error
        if isinstance(error, TimeoutError):
            for key in sandbox.images:
                if key in self._images.by_key:
                    self._loop.spawn(self._images.suspect(self._images.by_key[key]))
            return NodeError(f"{error} took too long")
        return SandboxSetupError(f"the sandbox could not be made: {error}")

    def attach(self, sandbox: Sandbox) -> Task[int]:
        """A new control socket to the sandbox's PID 1; the caller closes its fd once passed on."""
        if sandbox.changing is not None:
            # A reset that a daemon asked for which is gone since: it has another PID 1 after it.
            with suppress(OSError, TimeoutError, SandboxdError):
                yield sandbox.changing
        if sandbox.slot is None or sandbox.state is not SandboxState.RUNNING:
            raise SandboxLost("the sandbox is dead", reason=sandbox.reason)
        control = yield from self._slots.attach(sandbox.slot)
        return control.detach()

    # --- changing its root -------------------------------------------------------------------

    def change(
        self,
        sandbox: Sandbox,
        steps: Task[T],
        states: Collection[SandboxState] = (SandboxState.RUNNING,),
    ) -> Task[T]:
        """Run ``steps`` on a sandbox in one of ``states``, as the only ones to change it.

        Raises SandboxBusy, SandboxExclusive, SandboxLost, and what the steps raise.
        """
        if sandbox.exclusive:
            raise SandboxExclusive("an exclusive command has the sandbox to itself")
        if sandbox.state not in states:
            raise SandboxLost("the sandbox is not running", reason=sandbox.reason)
        if sandbox.changing is not None:
            raise SandboxBusy("the sandbox is being changed already")
        sandbox.changing = self._loop.spawn(steps)
        try:
            result: T = yield sandbox.changing
        finally:
            sandbox.changing = None
        return result

    def reset(
        self, sandbox: Sandbox, find_stack: Callable[[], Stack]
    ) -> Task[tuple[dict[str, float], int]]:
        """Begin anew on a stack, found when it begins: until then it may be let go of. Same id
        and limits, all else fresh. To be run by ``change``.

        A new slot and not a new root for the old one: what a root does not hold (shared memory,
        message queues, /dev, counts of the cgroup) must not live on either. Whatever runs is killed
        first. Returns milliseconds by phase and the new control socket's fd.
        """
        stack = find_stack()
        old_slot, old_root, old_link = sandbox.slot, sandbox.root, sandbox.attachment
        assert old_slot is not None
        assert old_root is not None
        old_slot.on_death = None
        old_slot.kill()
        sandbox.root = sandbox.attachment = None
        try:
            self._use(sandbox, stack.images)
            phases = yield from self.give_root(sandbox, stack)
            began = time.perf_counter()
            yield from self._loop.wait(old_slot.dead, DEATH_TIMEOUT_S, "the death of PID 1")
        except (OSError, TimeoutError, SandboxdError) as error:
            self._failed(sandbox, "reset-failed")
            raise self._failure(sandbox, error) from error
        else:
            phases["death"] = round((time.perf_counter() - began) * 1000, 3)
        finally:
            self.networks.detach(old_link)
            self._slots.discard(old_slot)
            self._roots.drop(old_root)
        return phases, self._control(sandbox)

    def freeze_upper(self, sandbox: Sandbox, flags: RootFlag) -> Task[Stack]:
        """Put a fresh upper on what the sandbox has written; returns that as a stack, shared once
        for the caller. To be run by ``change``.

        No process but PID 1 may live in it (``flags``): an open file or working directory would
        stay on the old overlay and go on writing into the frozen layer. Raises SandboxRunning.
        """
        slot, old = sandbox.slot, sandbox.root
        assert slot is not None
        assert old is not None
        stack = Stack(old.layers, sandbox.images)
        if len(stack.layers) > DEPTH_MAX:
            raise SnapshotTooDeep(f"a sandbox may stand on {DEPTH_MAX} layers")
        names = [self._images.mounted(key).name for key in stack.images]
        asked = self._roots.ask(stack, names, sandbox.limits)
        try:
            sandbox.root = yield from self._roots.put(
                slot, stack, asked, flags=flags, names=names, places=sandbox.places
            )
        except SandboxSetupError as error:
            if error.detail.get("step") == "root-busy":
                raise SandboxRunning(
                    "processes are running in the sandbox",
                    hint="end them, or ask with on_running: kill, or copy, which leaves them",
                ) from error
            self._failed(sandbox, "snapshot-failed")
            raise
        except TimeoutError as error:
            # PID 1 may still swap: then its root is one that was let go of.
            self._failed(sandbox, "snapshot-failed")
            raise self._failure(sandbox, error) from error
        except OSError as error:
            if error.errno in SERVER_DIED or sandbox.reason == "image-lost":
                raise ImageUnavailable("the image's server died") from error
            raise NodeError(f"the snapshot could not be taken: {error}") from error
        # The sandbox's own shares of the layers went from its old root to the new one's stack.
        self._roots.drop_overlay(old)
        self._layers.share(stack.layers)
        return stack

    def _use(self, sandbox: Sandbox, images: tuple[str, ...]) -> None:
        """Have a sandbox be a user of these images and no others. Raises ImageUnavailable."""
        mounted = [self._images.mounted(key) for key in images]
        for key in sandbox.images:
            if key in self._images.by_key:
                self._images.by_key[key].sandboxes.discard(sandbox.id)
        for image in mounted:
            image.sandboxes.add(sandbox.id)
        sandbox.images = images

    def _failed(self, sandbox: Sandbox, reason: str) -> None:
        """It is neither what it was nor what it should become."""
        sandbox.reason = sandbox.reason or reason
        if sandbox.slot is not None:
            sandbox.slot.kill()
        self._died(sandbox)

    # --- its end -----------------------------------------------------------------------------

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
            if sandbox.changing is not None:
                with suppress(OSError, TimeoutError, SandboxdError):
                    yield sandbox.changing
            if sandbox.slot is not None:
                sandbox.slot.kill()
                yield sandbox.slot.dead
                self._slots.discard(sandbox.slot)
            if sandbox.network is not None:
                self.networks.detach(sandbox.attachment)
                self.networks.forget(sandbox.id)
            self.by_id.pop(sandbox.id, None)
            for key in sandbox.images:
                if key in self._images.by_key:
                    self._images.by_key[key].sandboxes.discard(sandbox.id)
            if sandbox.root is not None:
                self._roots.drop(sandbox.root)

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
        return "node-lost" if self._slots.zygote_dies_within(ZYGOTE_S) else "exited"

    def image_lost(self, image: MountedImage) -> None:
        """The image's server died: end its sandboxes at once, before a command in one of them makes
        a result out of reads that failed."""
        self._slots.forget_image(image.name)
        for name in list(image.sandboxes):
            sandbox = self.by_id.get(name)
            if sandbox is not None and sandbox.state in (
                SandboxState.CREATING,
                SandboxState.RUNNING,
            ):
                sandbox.reason = "image-lost"
                if sandbox.slot is not None:
                    sandbox.slot.kill()

    def rows(self, after: str = "") -> list[SandboxRow]:
        """All that can be adopted or deleted, by id, from behind ``after`` on."""
        return [
            SandboxRow(
                s.id,
                s.slot.pid if s.slot else 0,
                str(s.state),
                s.images,
                s.meta,
                s.reason,
            )
            for s in sorted(self.by_id.values(), key=lambda s: s.id)
            if s.id > after and s.state is not SandboxState.CREATING
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
