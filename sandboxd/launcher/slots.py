"""Slots: sandboxes without an image, made ahead of need.

A slot is everything of a sandbox that does not depend on what it will be: its cgroups, its PID 1 in
namespaces of its own, locked up, with /proc, /dev and /sys ready and a control socket attached.
What it costs to make is then off the path of a create. A slot becomes one sandbox, and never a
second.

A ready slot may also be primed: given limits and a root of the image that is asked for most, before
it is asked for again (``primer``). It is given to whom it suits; for anybody else it is as good as
one without, since nothing has ever run in it: its root is swapped for the right one.

Order of making one (each step undone if a later one fails):
  1. its cgroups, without limits yet;
  2. its proc views are asked for, while the rest goes on, where there is a server for them;
  3. PID 1, cloned by the zygote straight into its cgroup2 directory; id maps are written then;
  4. M_SETUP: PID 1 joins the v1 cgroups, then unshares the cgroup namespace (the other way round
     /proc/self/cgroup would show where it stands), mounts, masks, locks itself up;
  5. M_ATTACH, sent with it: the control socket that the daemon will be given;
  6. M_VIEWS, once both are there.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sandboxd.errors import SandboxLost
from sandboxd.launcher.cgroups import NodeCgroups, SandboxCgroups, make
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.pid1 import Answer, Pid1, Zygote
from sandboxd.launcher.views import Views
from sandboxd.launcher.worker import Worker
from sandboxd.model import KernelCaps, Limits
from sandboxd.rootfs import skeleton

if TYPE_CHECKING:
    from sandboxd.launcher.roots import Root

CGROUP_REMOVAL_S: Final = 10.0
MAKING_AT_ONCE: Final = 2
"""Slots in the making for the pool: while one waits for the kernel another is worked on."""
IN_HAND_MAX: Final = 16
"""Slots in the making altogether, whoever needs them: a thousand creates at once would fill the
zygote's socket, and wait for each other's locks no shorter."""
REFILL_PAUSE_S: Final = 0.01
"""After a create: the making of the next slot shall not share the CPU with it."""
DEMAND_WINDOW_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Outfit:
    """What a primed slot is ready for: a sandbox of bare images with these limits."""

    images: tuple[str, ...]
    """Names among the mounts, lowest first: an image that is mounted anew has another."""
    limits: Limits


@dataclass(slots=True, eq=False)
class Slot:
    """A PID 1 that waits for a root, or has one: then its sandbox is the owner."""

    name: str
    shm_mb: int
    cgroups: SandboxCgroups
    pid1: Pid1
    pid: int = 0
    pidfd: int = -1
    control: socket.socket | None = None
    outfit: Outfit | None = None
    root: Root | None = None
    """Of a primed slot; once it is a sandbox, its root is the sandbox's."""
    set_up: Promise[None] = field(default_factory=Promise)
    """Settled once PID 1 has done its set-up, or is dead."""
    dead: Promise[None] = field(default_factory=Promise)
    on_death: Callable[[], None] | None = None
    """Called when PID 1 dies, before ``dead`` is settled."""

    def kill(self) -> None:
        """SIGKILL to PID 1, and by that to all of its pid namespace. ``dead`` tells when."""
        self.cgroups.lift_io()
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        else:
            self.dead.resolve(None)


class Slots:
    """Makes slots, and keeps as many ready as the recent demand asks for."""

    def __init__(
        self,
        loop: Loop,
        *,
        zygote: Zygote,
        cgroups: NodeCgroups,
        undertaker: Worker,
        drop_root: Callable[[Root], None],
        views: Views,
        caps: KernelCaps,
        ready_min: int,
        ready_max: int,
        last_id: int,
    ) -> None:
        self._loop = loop
        self._zygote = zygote
        self._cgroups = cgroups
        self._undertaker = undertaker
        self._drop_root = drop_root
        self._views = views
        self._caps = caps
        self._ready_min = ready_min
        self._ready_max = ready_max
        self._last_id = last_id
        self._masked = skeleton.masked_paths(os.cpu_count() or 1)
        self._names = itertools.count(1)
        self._ready: deque[Slot] = deque()
        self._making = 0
        self._in_hand = 0
        self._turns: deque[Promise[None]] = deque()
        self._taken_at: deque[float] = deque()
        self.names: set[str] = set()
        """Of all that are there, from their making to the removal of their cgroups."""
        self.in_teardown = 0
        """Cgroups of dead slots that are not removed yet."""

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def zygote_dead(self) -> bool:
        return self._zygote.dead

    def zygote_dies_within(self, seconds: float) -> bool:
        """Whether the zygote, with which all PID 1s die, has by then. Blocks."""
        return self._zygote.dies_within(seconds)

    def make(self, shm_mb: int) -> Task[Slot]:
        """A new slot. Raises SandboxSetupError naming the step, OSError, TimeoutError."""
        while self._in_hand >= IN_HAND_MAX:
            turn: Promise[None] = Promise()
            self._turns.append(turn)
            yield turn
        self._in_hand += 1
        try:
            return (yield from self._make(shm_mb))
        finally:
            self._in_hand -= 1
            if self._turns:
                self._turns.popleft().resolve(None)

    def _make(self, shm_mb: int) -> Task[Slot]:
        name = f"s{next(self._names)}"
        cgroups = make(self._cgroups, name)
        self.names.add(name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        slot = Slot(name, shm_mb, cgroups, Pid1(self._loop, ours))
        slot.dead.watch(lambda: slot.set_up.resolve(None))
        # The server of its views is asked for them while PID 1 comes to be.
        shown = self._views.add(slot)
        try:
            fds = cgroups.open_for_pid1()
            try:
                with theirs:
                    group = fds[0] if fds else None
                    slot.pid, slot.pidfd = yield from self._zygote.clone(theirs, group)
                if cgroups.watched is not None:
                    cgroups.watched.pid = slot.pid
                self._loop.add_reader(slot.pidfd, lambda: self._died(slot))
                done = slot.pid1.set_up(
                    skeleton.HOSTNAME, shm_mb, fds, self._masked, self._caps, last_id=self._last_id
                )
                slot.control, attached = self._begin_attach(slot)
                (namespace,) = yield from slot.pid1.check_fds(done, "set-up")
                slot.set_up.resolve(None)
                # PID 1's death would wait for the mounts in it to be taken down.
                self._undertaker.request("hold", (namespace,), key=name)
                os.close(namespace)
            finally:
                for fd in fds:
                    os.close(fd)
            yield from slot.pid1.check(attached, "attach")
            yield from self._views.wait(shown)
        except BaseException:
            slot.kill()
            self.discard(slot)
            raise
        return slot

    def attach(self, slot: Slot) -> Task[socket.socket]:
        """A new control socket to the slot's PID 1."""
        if slot.dead.settled:
            raise SandboxLost("the sandbox is dead")
        ours, done = self._begin_attach(slot)
        try:
            yield from slot.pid1.check(done, "attach")
        except BaseException:
            ours.close()
            raise
        return ours

    @staticmethod
    def _begin_attach(slot: Slot) -> tuple[socket.socket, Promise[Answer]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            return ours, slot.pid1.attach(theirs)

    def take(self, outfit: Outfit | None = None) -> Slot | None:
        """A ready slot: one primed with ``outfit``, else the oldest that is not primed, else the
        oldest; None where there is none."""
        self._taken_at.append(time.monotonic())
        slot = self._choose(outfit)
        if slot is not None:
            self._ready.remove(slot)
        # After whoever asked has what it waits for: the making of the next one is not on its way.
        self._loop.call_later(REFILL_PAUSE_S, self.refill)
        return slot

    def _choose(self, outfit: Outfit | None) -> Slot | None:
        plain: Slot | None = None
        for slot in self._ready:
            if slot.outfit is None:
                plain = plain or slot
            elif slot.outfit == outfit:
                return slot
        return plain or (self._ready[0] if self._ready else None)

    def borrow(self) -> Slot | None:
        """One that is not primed, to be primed and added again; None where it may be needed."""
        plain = [slot for slot in self._ready if slot.outfit is None]
        if len(plain) < 2:
            return None
        self._ready.remove(plain[-1])
        plain[-1].on_death = None
        return plain[-1]

    def primed(self) -> list[Outfit]:
        return [slot.outfit for slot in self._ready if slot.outfit is not None]

    def forget(self, outdated: Callable[[Outfit], bool]) -> None:
        """End the slots that are primed with what nobody will ask for."""
        for slot in [one for one in self._ready if one.outfit and outdated(one.outfit)]:
            self._ready.remove(slot)
            slot.on_death = None
            slot.kill()
            self.discard(slot)
        self.refill()

    def forget_image(self, name: str) -> None:
        """An image is unmounted or lost."""
        self.forget(lambda outfit: name in outfit.images)

    def discard(self, slot: Slot) -> None:
        """Remove what is left of a slot once it is dead."""
        self._loop.spawn(self._remove(slot))

    def refill(self) -> None:
        """Start the making of what is missing, or let go of what is too much."""
        wanted = self._wanted()
        while len(self._ready) + self._making < wanted and self._making < MAKING_AT_ONCE:
            self._making += 1
            self._loop.spawn(self._add())
        while len(self._ready) > 2 * wanted:
            slot = self._ready.pop()
            slot.kill()
            self.discard(slot)

    def keep_house(self) -> Task[None]:
        """For ever: follow a demand that falls."""
        while True:
            self.refill()
            yield from self._loop.sleep(DEMAND_WINDOW_S)

    def _wanted(self) -> int:
        """As many as were taken in the last window, within the bounds."""
        horizon = time.monotonic() - DEMAND_WINDOW_S
        while self._taken_at and self._taken_at[0] < horizon:
            self._taken_at.popleft()
        return max(self._ready_min, min(self._ready_max, len(self._taken_at)))

    def _add(self) -> Task[None]:
        try:
            slot = yield from self.make(skeleton.SHM_MB)
        except Exception as error:  # noqa: BLE001 - told by the create that needs one
            print(f"launcher: no slot: {error}", file=sys.stderr)
            self._making -= 1
            return
        self._making -= 1
        self.add(slot)
        self.refill()

    def add(self, slot: Slot) -> None:
        """Put a slot that is made, or primed, into the pool."""
        if slot.dead.settled:
            self.discard(slot)
            return
        slot.on_death = lambda: self._lost(slot)
        self._ready.append(slot)

    def _lost(self, slot: Slot) -> None:
        with suppress(ValueError):
            self._ready.remove(slot)
            self.discard(slot)

    def _died(self, slot: Slot) -> None:
        """PID 1 is dead, and so is everything that was in its pid namespace."""
        self._loop.remove_reader(slot.pidfd)
        os.close(slot.pidfd)
        slot.pidfd = -1
        slot.pid1.close()
        if slot.on_death is not None:
            slot.on_death()
        slot.dead.resolve(None)

    def _remove(self, slot: Slot) -> Task[None]:
        self.in_teardown += 1
        try:
            yield slot.dead
            slot.pid1.close()
            if slot.control is not None:
                slot.control.close()
            if slot.root is not None:
                self._drop_root(slot.root)
                slot.root = None
            with suppress(OSError):  # it died, and let go of everything with that
                yield self._undertaker.request("drop", key=slot.name)
            deadline = time.monotonic() + CGROUP_REMOVAL_S
            pause = 0.002
            while True:
                try:
                    slot.cgroups.remove(time.monotonic())
                except OSError as error:
                    if time.monotonic() > deadline:
                        print(f"launcher: cgroup left behind: {error}", file=sys.stderr)
                        return
                else:
                    return
                # A v1 cgroup tells nobody that its last, dying task has left it.
                yield from self._loop.sleep(pause)
                pause = min(2 * pause, 0.1)
        finally:
            self.names.discard(slot.name)  # what could not be removed is the sweep's
            self.in_teardown -= 1
