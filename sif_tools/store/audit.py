"""Is all of a store what it says it is? Every digest, every structural check, every reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sif_tools.errors import SifError
from sif_tools.image_config import image_config
from sif_tools.partition import overlay_partition, squashfs_partition
from sif_tools.reader import read_sif
from sif_tools.store import lookup
from sif_tools.store.delta_object import read_delta
from sif_tools.store.files import file_digest, read_json
from sif_tools.store.layout import Area, Layout, Suffix
from sif_tools.store.records import Role, SifRecord, parse_build, parse_image, parse_name
from sif_tools.store.trees import load_tree

Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """`path` is relative to the store."""

    path: str
    code: str
    message: str


@dataclass(slots=True)
class Audit:
    objects: int = 0
    object_bytes: int = 0
    records: int = 0
    problems: list[Problem] = field(default_factory=list)


def audit(layout: Layout, told: Told | None = None) -> Audit:
    """Look at all of it; nothing is changed. `told` gets objects and bytes so far."""
    look = _Look(layout, told)
    look.objects()
    look.records()
    return look.found


class _Look:
    def __init__(self, layout: Layout, told: Told | None) -> None:
        self._layout = layout
        self._told = told
        self.found = Audit()

    def _problem(self, path: Path, code: str, message: str) -> None:
        self.found.problems.append(Problem(str(path.relative_to(self._layout.root)), code, message))

    def _checked(self, path: Path, check: Callable[[], None]) -> None:
        try:
            check()
        except SifError as error:
            self._problem(path, error.code, error.message)
        except OSError as error:
            self._problem(path, "store-unreadable", str(error.strerror))
        except ValueError as error:
            self._problem(path, "store-damaged", str(error))

    def objects(self) -> None:
        for path in lookup.files_in(self._layout, Area.OBJECTS):
            self._checked(path, lambda: self._object(path))  # noqa: B023 - called at once

    def _object(self, path: Path) -> None:
        self.found.objects += 1
        self.found.object_bytes += path.stat().st_size
        if self._told is not None:
            self._told(self.found.objects, self.found.object_bytes)
        if file_digest(path) != path.stem:
            self._problem(path, "digest-mismatch", "its bytes are not those it is named by")
            return
        if path.suffix == Suffix.TREE:
            load_tree(path.read_bytes())
        else:
            self._sif(path)

    def _sif(self, path: Path) -> None:
        sif = read_sif(path)
        # Whatever machine it is made for: a store may serve several kinds.
        if sif.primary is None:
            overlay_partition(sif, path)
            read_delta(sif, path)
        else:
            squashfs_partition(sif, path)
        image_config(sif, path)

    def records(self) -> None:
        parsers: dict[Area, Callable[[Path, Any], None]] = {
            Area.BUILDS: self._build,
            Area.IMAGES: self._image,
            Area.NAMES: self._name,
        }
        for area, check in parsers.items():
            for path in lookup.files_in(self._layout, area):
                self.found.records += 1
                self._checked(path, lambda: check(path, read_json(path)))  # noqa: B023 - at once

    def _build(self, path: Path, node: Any) -> None:
        record = parse_build(node)
        self._needs(path, record.sif)
        tree = self._layout.object(record.tree.digest, Suffix.TREE)
        if not tree.exists() or tree.stat().st_size != record.tree.size_bytes:
            self._problem(path, "store-damaged", f"its list of names {tree.name} is missing")

    def _image(self, path: Path, node: Any) -> None:
        record = parse_image(node)
        missing = [sif for sif in record.sifs if not self._needs(path, sif)]
        delta = record.sifs[-1]
        if not missing and delta.role is Role.DELTA:
            file = self._layout.object(delta.digest, Suffix.SIF)
            below = read_delta(read_sif(file), file).get("below")
            if below != [f"sha256:{sif.digest}" for sif in record.sifs[:-1]]:
                self._problem(path, "store-damaged", "its delta belongs on other SIFs")

    def _name(self, path: Path, node: Any) -> None:
        record = parse_name(node)
        if self._layout.name(record.name) != path:
            self._problem(path, "store-damaged", f"it is the record of {record.name!r}")
        if not self._layout.image(record.image).exists():
            self._problem(path, "store-damaged", "the image it stands for is missing")

    def _needs(self, path: Path, sif: SifRecord) -> bool:
        file = self._layout.object(sif.digest, Suffix.SIF)
        if not file.exists():
            self._problem(path, "store-damaged", f"its {sif.role} {sif.digest} is missing")
            return False
        if file.stat().st_size != sif.size_bytes:
            self._problem(path, "store-damaged", f"its {sif.role} {sif.digest} has another size")
            return False
        return True
