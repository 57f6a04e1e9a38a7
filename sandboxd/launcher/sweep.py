"""What a living node has lost track of: cgroups without a slot, mounts without an image, children
that nobody waits for.

None of it should be there; each is a fault of ours, told on stderr, that must not fill a node up
over weeks. Only what is found twice, a whole round apart, is taken for lost: what is being made or
taken down is neither there for so long nor without a record.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from sandboxd.launcher.cgroups import NodeCgroups
from sandboxd.launcher.images import Images
from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.loop import Loop, Task
from sandboxd.launcher.slots import Slots
from sandboxd.launcher.staging import Staging
from sandboxd.launcher.views import Views
from sandboxd.linux import cgroup, procfs

_SLOT: Final = re.compile(r"s[0-9]+")


class Sweep:
    """``mount_dir``: where the images are mounted."""

    def __init__(
        self,
        loop: Loop,
        *,
        cgroups: NodeCgroups,
        slots: Slots,
        images: Images,
        mounter: Lanes,
        mount_dir: str,
        staging: Staging | None = None,
        views: Views | None = None,
    ) -> None:
        self._loop = loop
        self._cgroups = cgroups
        self._slots = slots
        self._images = images
        self._mounter = mounter
        self._mount_dir = mount_dir
        self._staging = staging
        self._views = views
        self._suspects: set[str] = set()
        self.removed = 0
        """Since the start."""

    def keep_house(self, every_s: float) -> Task[None]:
        """For ever: look, and remove what was lost last time already."""
        while True:
            yield from self._loop.sleep(every_s)
            self.look()

    def look(self) -> list[str]:
        """One round; what was removed."""
        found: dict[str, Callable[[], object]] = {}
        for path in self._lost_cgroups():
            found[f"cgroup {path}"] = partial(_remove, path)
        for name in self._lost_mounts():
            found[f"mount {name}"] = partial(
                self._mounter.request, "unmount", lanes=(name,), name=name
            )
        for pid, start_ticks in _zombies():
            found[f"zombie {pid} started {start_ticks}"] = partial(os.waitpid, pid, os.WNOHANG)
        lost = sorted(found.keys() & self._suspects)
        for what in lost:
            try:
                found[what]()
            except OSError as error:  # what was killed in it has not ended yet: the next round
                print(f"launcher: {what} stays: {error}", file=sys.stderr)
            else:
                self.removed += 1
                print(f"launcher: swept {what}", file=sys.stderr)
        self._suspects = set(found)
        return lost

    def _lost_cgroups(self) -> Iterator[Path]:
        for parent in self._cgroups.directories:
            for name in os.listdir(parent):
                if _SLOT.fullmatch(name) and name not in self._slots.names:
                    yield parent / name

    def _lost_mounts(self) -> list[str]:
        known = {image.name for image in self._images.by_key.values()}
        if self._staging is not None:
            known |= self._staging.attached
        if self._views is not None:
            known |= self._views.attached
        return [name for name in os.listdir(self._mount_dir) if name not in known]


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):  # v1: its processes are in the v2 one too
        cgroup.kill(path)
    cgroup.remove_tree(path, time.monotonic())


def _zombies() -> Iterator[tuple[int, int]]:
    """Children of workers that were killed come to the launcher, their subreaper, which never hears
    of them: it waits for its own by pidfd."""
    for pid in procfs.children():
        with suppress(OSError):
            found = procfs.stat(pid)
            if found.state == "Z":
                yield pid, found.start_ticks
