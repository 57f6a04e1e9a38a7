"""Snapshots of sandboxes, and what is made from them: rollbacks and forks.

A snapshot is a stack of frozen layers. Taking one puts a fresh upper on a sandbox and copies
nothing; standing on one is an overlay with other lowers. With a live process that cannot be had
(see ``Sandboxes.freeze_upper``): then it is refused, or the processes are killed, or their files
copied while they are frozen, as the caller chose.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Any, Final

from sandboxd.errors import (
    DiskFull,
    NodeError,
    RequestError,
    SandboxRunning,
    SnapshotNotFound,
    TreeTooLarge,
)
from sandboxd.init.protocol import RootFlag
from sandboxd.launcher import freeze
from sandboxd.launcher.flattening import Flattening
from sandboxd.launcher.images import Images
from sandboxd.launcher.layers import Layer, Layers, Snapshot, Stack
from sandboxd.launcher.loop import Loop, Task
from sandboxd.launcher.sandboxes import Sandbox, Sandboxes
from sandboxd.launcher.staging import Staging
from sandboxd.launcher.worker import Worker
from sandboxd.model import Limits

COPY_TIMEOUT_S: Final = 120.0

_BY_ITS_FILES: Final = {errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG}
"""What a copy fails with for the shape of a sandbox's tree."""


class Snapshots:
    def __init__(
        self,
        loop: Loop,
        *,
        sandboxes: Sandboxes,
        layers: Layers,
        copier: Worker,
        images: Images,
        images_dir: str,
        staging: Staging | None = None,
    ) -> None:
        """``staging``: where the copier cannot make a layer on its own."""
        self._loop = loop
        self._staging = staging
        self._sandboxes = sandboxes
        self._layers = layers
        self._copier = copier
        self.by_id: dict[str, Snapshot] = {}
        self._flattening = Flattening(
            loop,
            sandboxes=sandboxes,
            images=images,
            layers=layers,
            snapshots=self.by_id,
            images_dir=images_dir,
            staging=staging,
        )

    def find(self, name: str) -> Snapshot:
        snapshot = self.by_id.get(name)
        if snapshot is None:
            raise SnapshotNotFound(f"no snapshot {name}")
        return snapshot

    def take(self, request: dict[str, Any]) -> Task[dict[str, Any]]:
        """Take one of ``sandbox`` under the id ``snapshot``.

        ``on_running``: ``fail``, ``kill`` or ``copy``. Answers what was done (``how``: ``frozen``,
        ``killed``, ``copied``), its milliseconds and, for a copy, how long processes were frozen.
        Raises SandboxRunning, SandboxBusy, SandboxLost, SnapshotTooDeep, DiskFull.
        """
        name, on_running = request["snapshot"], request["on_running"]
        if name in self.by_id:
            raise RequestError(f"there is a snapshot {name}")
        sandbox = self._sandboxes.find(request["sandbox"])
        began = time.perf_counter()
        yield from self._flattening.make_room(sandbox)
        answer: dict[str, Any] = {"snapshot": name, "how": "frozen"}
        try:
            stack = yield from self._freeze(sandbox, RootFlag.ROOT_IDLE)
        except SandboxRunning:
            if on_running == "kill":
                stack = yield from self._freeze(sandbox, RootFlag.ROOT_KILL)
                answer["how"] = "killed"
            elif on_running == "copy":
                steps = self._copy(sandbox)
                stack, answer["frozen_ms"] = yield from self._sandboxes.change(sandbox, steps)
                answer["how"] = "copied"
            else:
                raise
        self.by_id[name] = Snapshot(name, sandbox.id, stack, request["meta"])
        self._flattening.consider(sandbox)
        answer["ms"] = round((time.perf_counter() - began) * 1000, 3)
        answer["bytes"] = stack.used_bytes()
        return answer

    def _freeze(self, sandbox: Sandbox, flags: RootFlag) -> Task[Stack]:
        steps = self._sandboxes.freeze_upper(sandbox, flags)
        return (yield from self._sandboxes.change(sandbox, steps))

    def _copy(self, sandbox: Sandbox) -> Task[tuple[Stack, float]]:
        """The stack with a copy of the upper in the place of the upper, made while every process of
        the sandbox is frozen; and for how many milliseconds they were."""
        assert sandbox.slot is not None
        assert sandbox.root is not None
        root = sandbox.root
        cgroups = sandbox.slot.cgroups
        began = time.perf_counter()
        try:
            yield from freeze.freeze(self._loop, cgroups)
            copy = yield from self._copy_layer(root.upper, sandbox.limits)
        except (OSError, TimeoutError) as error:
            if isinstance(error, OSError) and error.errno in _BY_ITS_FILES:
                raise TreeTooLarge(
                    "its directories are too deep to be copied", hint="use on_running: kill"
                ) from error
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise DiskFull("what was written does not fit a second time") from error
            raise NodeError(f"the layer could not be copied: {error}") from error
        finally:
            freeze.thaw(cgroups)
        frozen_ms = round((time.perf_counter() - began) * 1000, 3)
        self._layers.share(root.stack.layers)
        return Stack((copy, *root.stack.layers), sandbox.images), frozen_ms

    def _copy_layer(self, layer: Layer, limits: Limits) -> Task[Layer]:
        """A new layer with the content of one that nobody writes to now. OSError, TimeoutError."""
        size = {"size_bytes": limits.disk_mb * 1024 * 1024, "inodes": limits.inodes}
        staging = self._staging
        if staging is None:
            asked = self._copier.request("copy", (layer.fd,), **size)
            reply = yield from self._loop.wait(asked, COPY_TIMEOUT_S, "copying the layer")
            return self._layers.adopt(reply.fds[0])
        name, fd = self._layers.new_name(), (yield from staging.make(**size))
        try:
            asked = self._copier.request("copy", (layer.fd, fd), **size)
            yield from self._loop.wait(asked, COPY_TIMEOUT_S, "copying the layer")
            staging.attach(fd, name)
        except BaseException:
            os.close(fd)
            raise
        return self._layers.adopt(fd, name)

    def delete(self, name: str) -> None:
        """Let go of one; what stands on it lives on. Not having it is no error."""
        snapshot = self.by_id.pop(name, None)
        if snapshot is not None:
            self._layers.release(snapshot.stack.layers)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "snapshot": s.id,
                "sandbox": s.sandbox,
                "images": list(s.stack.images),
                "depth": len(s.stack.layers),
                "bytes": s.stack.used_bytes(),
                "meta": s.meta,
            }
            for s in sorted(self.by_id.values(), key=lambda s: s.id)
        ]
