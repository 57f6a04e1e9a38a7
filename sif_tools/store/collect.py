"""Remove from a store what no name leads to. The order is in the package's docstring.

A record or an object goes to the trash when nothing has referred to it for `grace_s`, counted from
the newest of its own time stamp and, for an object, those of the records that named it: a converter
publishes from the bottom up, so what it has just made is referred to by nothing yet.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sif_tools.errors import StoreWriteFailed
from sif_tools.store import lookup
from sif_tools.store.files import TEMPORARY, make_parents, read_json, server_time
from sif_tools.store.layout import Area, Layout, Suffix
from sif_tools.store.leases import leased
from sif_tools.store.records import parse_build, parse_image, parse_name

GRACE_S: Final = 7 * 24 * 3600.0


@dataclass(slots=True)
class Collected:
    """What was done, or would be. Bytes are of objects."""

    names: int = 0
    kept_objects: int = 0
    leased: int = 0
    trashed: list[str] = field(default_factory=list)
    trashed_bytes: int = 0
    removed: list[str] = field(default_factory=list)
    removed_bytes: int = 0
    restored: list[str] = field(default_factory=list)
    leftovers: int = 0


def collect(
    layout: Layout,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    drop_names: Iterable[str] = (),
) -> Collected:
    """One round. Raises SifError where the store cannot be read: then nothing is removed, as what
    cannot be read may be a reference."""
    try:
        return _Round(layout, grace_s, dry_run).run(drop_names)
    except OSError as error:
        raise StoreWriteFailed(f"{error.filename or layout.root}: {error.strerror}") from error


class _Round:
    def __init__(self, layout: Layout, grace_s: float, dry_run: bool) -> None:
        self._layout = layout
        self._grace_s = grace_s
        self._dry_run = dry_run
        self._now = server_time(layout.root)
        self.report = Collected()

    def run(self, drop_names: Iterable[str]) -> Collected:
        for name in drop_names:
            if not self._dry_run:
                with suppress(FileNotFoundError):
                    self._layout.name(name).unlink()
        in_use, dead = leased(self._layout)
        self.report.leased = len(in_use)
        wanted = self._wanted_images()
        objects = self._sweep_images(wanted)
        objects |= self._sweep_builds(objects)
        self._sweep_objects(objects | in_use)
        self._empty_trash(in_use)
        self._sweep_leftovers(dead)
        return self.report

    def _is_old(self, path: Path) -> bool:
        try:
            return self._now - os.stat(path).st_mtime > self._grace_s
        except FileNotFoundError:
            return False

    def _wanted_images(self) -> set[str]:
        found = set()
        for path in lookup.files_in(self._layout, Area.NAMES):
            node = read_json(path)
            if node is not None:
                found.add(parse_name(node).image)
                self.report.names += 1
        return found

    def _sweep_images(self, wanted: set[str]) -> set[str]:
        """Objects of the images that stay: those with a name, and the young."""
        objects: set[str] = set()
        for path in lookup.files_in(self._layout, Area.IMAGES):
            if path.stem not in wanted and self._is_old(path):
                self._unlink_record(path)
                continue
            node = read_json(path)
            if node is not None:
                objects.update(sif.digest for sif in parse_image(node).sifs)
        return objects

    def _sweep_builds(self, objects: set[str]) -> set[str]:
        """Records of runs of layers stay with their SIF; the lists of names with the record."""
        trees: set[str] = set()
        for path in lookup.files_in(self._layout, Area.BUILDS):
            node = read_json(path)
            if node is None:
                continue
            record = parse_build(node)
            if record.sif.digest not in objects and self._is_old(path):
                self._unlink_record(path)
            else:
                trees |= {record.sif.digest, record.tree.digest}
        return trees

    def _unlink_record(self, path: Path) -> None:
        self.report.trashed.append(str(path.relative_to(self._layout.root)))
        if not self._dry_run:
            # Small, and made anew from the image: nobody has it open for longer than a moment.
            with suppress(FileNotFoundError):
                path.unlink()

    def _sweep_objects(self, wanted: set[str]) -> None:
        for path in lookup.files_in(self._layout, Area.OBJECTS):
            if path.stem in wanted or not self._is_old(path):
                self.report.kept_objects += 1
                continue
            with suppress(FileNotFoundError):
                self.report.trashed_bytes += os.stat(path).st_size
                self.report.trashed.append(str(path.relative_to(self._layout.root)))
                if not self._dry_run:
                    target = self._layout.trashed(path.stem, Suffix(path.suffix))
                    make_parents(target)
                    os.rename(path, target)
                    # From now on its time stamp says when it came here.
                    os.utime(target)

    def _empty_trash(self, in_use: set[str]) -> None:
        """Remove what has lain there for the grace time, unless it is referred to again."""
        candidates = [
            path
            for path in lookup.files_in(self._layout, Area.TRASH)
            if path.stem not in in_use and self._is_old(path)
        ]
        if not candidates:
            return
        # Looked at again, now: a converter may have found an object just before it came here.
        wanted = self._referred()
        for path in candidates:
            if path.stem in wanted:
                self._restore(path)
                continue
            with suppress(FileNotFoundError):
                self.report.removed_bytes += os.stat(path).st_size
                self.report.removed.append(str(path.relative_to(self._layout.root)))
                if not self._dry_run:
                    path.unlink()

    def _referred(self) -> set[str]:
        found: set[str] = set()
        for path in lookup.files_in(self._layout, Area.IMAGES):
            if (node := read_json(path)) is not None:
                found.update(sif.digest for sif in parse_image(node).sifs)
        for path in lookup.files_in(self._layout, Area.BUILDS):
            if (node := read_json(path)) is not None:
                build = parse_build(node)
                found |= {build.sif.digest, build.tree.digest}
        return found

    def _restore(self, path: Path) -> None:
        self.report.restored.append(path.stem)
        if self._dry_run:
            return
        target = self._layout.object(path.stem, Suffix(path.suffix))
        make_parents(target)
        with suppress(FileExistsError):
            os.link(path, target)
        with suppress(FileNotFoundError):
            path.unlink()

    def _sweep_leftovers(self, dead: list[Path]) -> None:
        """Temporary files of the killed, and leases of the dead."""
        leftovers = [
            path
            for area in (Area.OBJECTS, Area.BUILDS, Area.IMAGES, Area.NAMES)
            for path in lookup.all_files_in(self._layout, area)
            if path.name.startswith(".") and path.name.endswith(TEMPORARY)
        ]
        claims = self._layout.root / Area.CLAIMS
        with suppress(FileNotFoundError):
            leftovers += [claims / name for name in os.listdir(claims)]
        for path in leftovers:
            if self._is_old(path):
                self.report.leftovers += 1
                if not self._dry_run:
                    with suppress(FileNotFoundError):
                        path.unlink()
        for holder in dead:
            self.report.leftovers += 1
            if not self._dry_run:
                shutil.rmtree(holder, ignore_errors=True)
