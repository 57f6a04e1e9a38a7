"""A sandbox's root: the first one, a new one at a reset, one frozen in a snapshot.

A root is an overlay of a fresh upper over a stack. It is made by the mounter and put in place by
PID 1; the undertaker holds the overlay, so that what lets go of it elsewhere costs nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.errors import DiskFull
from sandboxd.launcher.host_mounts import target_error
from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.layers import Layer, Layers, Stack
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.slots import Slot
from sandboxd.launcher.staging import Staging
from sandboxd.launcher.worker import Reply, Worker
from sandboxd.model import Limits

ROOT_TIMEOUT_S: Final = 10.0
SMALLEST_UPPER_BYTES: Final = 1024 * 1024

Fill = Callable[[int], Task[dict[str, float]]]
"""Puts files into a root, given its mount, before its PID 1 has it; what it did, by name."""


@dataclass(eq=False, slots=True)
class Root:
    """What a sandbox has as its root now."""

    stack: Stack
    upper: Layer
    overlay_key: str
    overlay_fd: int
    """Its mount, to copy from (``transfers.py``). Never the last reference, as the undertaker has
    another."""
    filled: dict[str, float]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All that it has written or stands on, highest first."""
        return (self.upper, *self.stack.layers)


class Roots:
    def __init__(
        self,
        loop: Loop,
        *,
        mounter: Lanes,
        undertaker: Worker,
        layers: Layers,
        staging: Staging | None = None,
    ) -> None:
        """``staging``: where the mounter cannot make a root on its own."""
        self._loop = loop
        self._staging = staging
        self._mounter = mounter
        self._undertaker = undertaker
        self._layers = layers
        self._keys = itertools.count(1)

    def ask(
        self, stack: Stack, names: Sequence[str], limits: Limits, *, resolv: str | None = None
    ) -> Promise[Reply]:
        """Have a root made; nothing is waited for. Settle it with ``put`` or ``forget``.

        ``names`` are those of the stack's images among the mounts.
        ``disk_mb`` holds for all layers of the stack together, as the memory cgroup does. Raises
        DiskFull where nothing would be left of it. ``resolv`` replaces /etc/resolv.conf.
        """
        size_bytes = limits.disk_mb * 1024 * 1024 - stack.used_bytes()
        if size_bytes < SMALLEST_UPPER_BYTES:
            raise DiskFull(f"the snapshot's layers take all of {limits.disk_mb} MiB of disk")
        lowers = list(reversed(names))
        if self._staging is not None:
            name = self._layers.new_name()
            return self._staging.ask(
                name, stack.layers, lowers, size_bytes, limits.inodes, resolv=resolv
            )
        return self._mounter.request(
            "root",
            tuple(layer.fd for layer in stack.layers),
            lanes=tuple(lowers),
            lowers=lowers,
            size_bytes=size_bytes,
            inodes=limits.inodes,
            resolv=resolv,
        )

    def put(
        self,
        slot: Slot,
        stack: Stack,
        asked: Promise[Reply],
        *,
        hostname: str | None = None,
        flags: int = 0,
        fill: Fill | None = None,
        names: Sequence[str] = (),
        places: Sequence[dict[str, Any]] = (),
        mounts: Sequence[tuple[int, str]] = (),
    ) -> Task[Root]:
        """Make it the root of a slot's PID 1. The stack's layers must be shared already.

        ``names`` as for ``ask``. ``places`` are what the sandbox's ``mounts`` go over; those are
        given to a PID 1 once.
        Raises MountTargetInvalid, SandboxSetupError, OSError, TimeoutError; the root is gone then.
        """
        reply = yield from self._loop.wait(asked, ROOT_TIMEOUT_S, "mounting the root")
        overlay_fd, layer_fd = reply.fds
        upper = self._layers.adopt(layer_fd, reply.value.get("layer"))
        root = Root(stack, upper, f"r{next(self._keys)}", overlay_fd, {})
        # Before PID 1 has it: or PID 1's death could be the one that pays.
        self._undertaker.request("hold", (overlay_fd,), key=root.overlay_key)
        try:
            slot.cgroups.limit_devices(os.fstat(layer.fd).st_dev for layer in root.layers)
            if fill is not None:
                root.filled = yield from fill(overlay_fd)
            if places:
                yield from self._make_targets(overlay_fd, names, places)
            done = slot.pid1.take_root(overlay_fd, hostname, flags, mounts)
            yield from slot.pid1.check(done, "root swap")
        except BaseException:
            self.drop_overlay(root)
            self._layers.release((upper,))
            raise
        return root

    def _make_targets(
        self, overlay_fd: int, names: Sequence[str], places: Sequence[dict[str, Any]]
    ) -> Task[None]:
        made = self._mounter.request(
            "targets", (overlay_fd,), lanes=tuple(names), places=list(places)
        )
        try:
            yield from self._loop.wait(made, ROOT_TIMEOUT_S, "making what is mounted over")
        except OSError as error:
            known = target_error(error)
            raise (error if known is None else known) from None

    def forget(self, asked: Promise[Reply]) -> None:
        """A root that was asked for and is not wanted any more."""
        asked.abandon()

    def drop_overlay(self, root: Root) -> None:
        """After PID 1 has let go of it. The layers are another matter."""
        os.close(root.overlay_fd)
        self._undertaker.request("drop", key=root.overlay_key)

    def drop(self, root: Root) -> None:
        """A dead sandbox's root, with its share of every layer."""
        self.drop_overlay(root)
        self._layers.release(root.layers)
