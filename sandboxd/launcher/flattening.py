"""Stacks kept low: frozen layers that were merged behind the snapshots that made them.

Each snapshot puts one layer more under a sandbox, and each layer costs every look-up of what is not
there. From ``FLATTEN_ABOVE`` on the uppermost are merged into a new one, in the background, one
sandbox at a time. Frozen layers never change, so the new one can stand wherever that very run of
layers stood: in the sandbox's stack, its snapshots', its forks'. Who stands on a part of the run
keeps that part. What is mounted goes on standing on the old layers until its next root.

Merged are the uppermost, and those below as long as they are not larger than twice what is merged
already: so a byte is copied a few times in the life of a long chain, and not at each turn.

The copy is charged to the sandbox, whose memory must have room for it: the child that copies enters
its cgroup, and is killed with it. Where there is no room nothing is merged, and at
``sandboxes.DEPTH_MAX`` a snapshot is refused.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sandboxd.errors import SandboxdError
from sandboxd.launcher import usage
from sandboxd.launcher.cgroups import RESERVE_BYTES, V1_ENTRY, SandboxCgroups
from sandboxd.launcher.images import Images
from sandboxd.launcher.layers import Layer, Layers, Snapshot, Stack
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.sandboxes import DEPTH_MAX, Sandbox, Sandboxes
from sandboxd.launcher.staging import Staging
from sandboxd.launcher.worker import Handler, Worker
from sandboxd.linux import cgroup
from sandboxd.linux.process import raise_oom_score, set_dumpable
from sandboxd.model import SandboxState
from sandboxd.rootfs.flatten import merge_layers
from sandboxd.rootfs.overlay import make_view, make_writable_layer

FLATTEN_ABOVE: Final = 8
MERGED_MIN: Final = 4
MERGE_TIMEOUT_S: Final = 120.0
_SLACK_BYTES: Final = 1 << 20


class Flattening:
    def __init__(
        self,
        loop: Loop,
        *,
        sandboxes: Sandboxes,
        images: Images,
        layers: Layers,
        snapshots: Mapping[str, Snapshot],
        images_dir: str,
        staging: Staging | None,
    ) -> None:
        self._loop = loop
        self._sandboxes = sandboxes
        self._images = images
        self._layers = layers
        self._snapshots = snapshots
        self._images_dir = images_dir
        self._staging = staging
        self._wanted: OrderedDict[str, Promise[None]] = OrderedDict()
        self._running = False

    def consider(self, sandbox: Sandbox) -> Promise[None] | None:
        """Have a sandbox's stack merged where it is high; settled when that is done, or could not
        be. None where there is nothing to merge."""
        if sandbox.root is None or not self._choose(sandbox.root.stack.layers):
            return None
        done = self._wanted.get(sandbox.id)
        if done is None:
            done = self._wanted[sandbox.id] = Promise()
            if not self._running:
                self._running = True
                self._loop.spawn(self._work())
        return done

    def make_room(self, sandbox: Sandbox) -> Task[None]:
        """Wait for a merge where a snapshot would be refused without: they come faster than
        merges."""
        while sandbox.root is not None and len(sandbox.root.layers) > DEPTH_MAX:
            before = sandbox.root.stack
            done = self.consider(sandbox)
            if done is None:
                return
            yield done
            if sandbox.root is None or sandbox.root.stack is before:
                return

    def _work(self) -> Task[None]:
        while self._wanted:
            name, done = next(iter(self._wanted.items()))
            sandbox = self._sandboxes.by_id.get(name)
            try:
                if sandbox is not None and sandbox.state is SandboxState.RUNNING:
                    yield from self._flatten(sandbox)
            except (OSError, TimeoutError, SandboxdError) as error:
                print(f"launcher: layers are not merged: {error}", file=sys.stderr)
            finally:
                del self._wanted[name]
                done.resolve(None)
        self._running = False

    @staticmethod
    def _choose(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """The run to merge, from the uppermost on; empty for none."""
        if len(layers) <= FLATTEN_ABOVE:
            return ()
        run: list[Layer] = []
        total = 0
        for layer in layers:
            size = layer.used_bytes()
            if not layer.mergeable or (len(run) >= MERGED_MIN and size > 2 * total):
                break
            run.append(layer)
            total += size
        return tuple(run) if len(run) >= 2 else ()

    def _flatten(self, sandbox: Sandbox) -> Task[None]:
        root, slot = sandbox.root, sandbox.slot
        if root is None or slot is None:
            return
        stack = root.stack
        run = self._choose(stack.layers)
        size = sum(layer.used_bytes() for layer in run) + _SLACK_BYTES
        if not run or not _has_room(sandbox, slot.cgroups, size):
            return
        held = stack.layers
        self._layers.share(held)
        try:
            merged = yield from self._merge(sandbox, stack, run)
        finally:
            self._layers.release(held)
        self._replace(run, merged)
        self._layers.release((merged,))

    def _merge(self, sandbox: Sandbox, stack: Stack, run: tuple[Layer, ...]) -> Task[Layer]:
        slot = sandbox.slot
        assert slot is not None
        below = stack.layers[len(run) :]
        found = [os.fstatvfs(layer.fd) for layer in run]
        size = {
            "size_bytes": sandbox.limits.disk_mb * 1024 * 1024,
            "inodes": sum(one.f_files - one.f_ffree for one in found),
        }
        names = [self._images.mounted(key).name for key in reversed(stack.images)]
        worker = Worker(self._loop, "flattener", lambda: _handlers(self._images_dir))
        made: tuple[int, ...] = ()
        name = None
        try:
            if self._staging is not None:
                name = self._layers.new_name()
                made = ((yield from self._staging.make(**size)),)
            asked = worker.request(
                "merge",
                (*made, *(layer.fd for layer in (*run, *below))),
                made=bool(made),
                run=len(run),
                lowers=names,
                attached=[one.name for one in below] if self._staging is not None else None,
                entry=_memory_entry(slot.cgroups),
                **size,
            )
            # It is in the sandbox's cgroup, which goes with the sandbox.
            slot.dead.watch(worker.kill)
            try:
                reply = yield from self._loop.wait(asked, MERGE_TIMEOUT_S, "merging layers")
            except (OSError, TimeoutError):
                if not slot.dead.settled:
                    run[0].mergeable = False
                raise
            if name is None:
                return self._layers.adopt(reply.fds[0])
            assert self._staging is not None
            self._staging.attach(made[0], name)
            fd, made = made[0], ()
            return self._layers.adopt(fd, name)
        finally:
            worker.kill()
            for fd in made:
                os.close(fd)

    def _replace(self, run: tuple[Layer, ...], merged: Layer) -> None:
        """Let whoever stands on all of ``run`` stand on ``merged``."""
        for snapshot in self._snapshots.values():
            snapshot.stack = self._replaced(snapshot.stack, run, merged)
        for sandbox in self._sandboxes.by_id.values():
            # One that is being changed is making a root of the stack that it has.
            if sandbox.root is not None and sandbox.changing is None:
                sandbox.root.stack = self._replaced(sandbox.root.stack, run, merged)

    def _replaced(self, stack: Stack, run: tuple[Layer, ...], merged: Layer) -> Stack:
        layers = stack.layers
        if run[0] not in layers:
            return stack
        at = layers.index(run[0])
        if layers[at : at + len(run)] != run:
            return stack
        self._layers.share((merged,))
        self._layers.release(run)
        return Stack((*layers[:at], merged, *layers[at + len(run) :]), stack.images)


def _has_room(sandbox: Sandbox, cgroups: SandboxCgroups, size: int) -> bool:
    limits = sandbox.limits
    most = (limits.memory_mb + limits.disk_mb) * 1024 * 1024 + RESERVE_BYTES
    used = usage.usage(cgroups)["memory_bytes"]
    return used is None or used + size <= most


def _memory_entry(cgroups: SandboxCgroups) -> str | None:
    """The file by which a process enters what counts the sandbox's memory."""
    if "memory" in cgroups.v1:
        return str(cgroups.v1["memory"] / V1_ENTRY)
    if cgroups.v2 is not None and "memory" in cgroups.node.v2_controllers:
        return str(cgroups.v2 / "cgroup.procs")
    return None


def _handlers(images_dir: str) -> Mapping[str, Handler]:
    """Of the child."""

    def merge(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        with suppress(OSError):
            # Where memory runs out after all, it and not a program of the sandbox is what goes.
            # A process's own files are closed to it while it is not dumpable.
            set_dumpable(True)
            raise_oom_score(1000)
        set_dumpable(False)
        if request["entry"] is not None:
            cgroup.write(Path(request["entry"]), 0)
        made, layers = (fds[:1], fds[1:]) if request["made"] else ([], fds)
        run, below = layers[: request["run"]], layers[request["run"] :]
        view = make_view(images_dir, request["lowers"], below, request["attached"])
        try:
            if made:
                merge_layers(run, view, made[0])
                return {}, ()
            merged = make_writable_layer(request["size_bytes"], request["inodes"])
            try:
                merge_layers(run, view, merged)
            except BaseException:
                os.close(merged)
                raise
            return {}, (merged,)
        finally:
            os.close(view)

    return {"merge": merge}
