"""The records of a store as values, and as the JSON they are kept in.

::

    builds/…  {"version": 1, "layers": […diff_ids], "below": n, "sif": SIF, "tree": OBJECT}
    images/…  {"version": 1, "image": digest or null, "architecture": …, "layers": "shared"|"flat",
               "sifs": [SIF …], "source_bytes": …}
    names/…   {"version": 1, "name": …, "image": key, "manifest_digest": digest or null}
    SIF       {"digest": 64 hex digits, "size_bytes": …, "role": base|shared|delta|flat}
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sif_tools.errors import StoreDamaged

VERSION: Final = 1
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Role(StrEnum):
    """What a SIF is to an image."""

    BASE = "base"
    SHARED = "shared"
    DELTA = "delta"
    FLAT = "flat"


class Layers(StrEnum):
    """How an image is kept."""

    SHARED = "shared"
    FLAT = "flat"


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    digest: str
    size_bytes: int

    def node(self) -> dict[str, Any]:
        return {"digest": self.digest, "size_bytes": self.size_bytes}


@dataclass(frozen=True, slots=True)
class SifRecord:
    digest: str
    size_bytes: int
    role: Role

    def node(self) -> dict[str, Any]:
        return {"digest": self.digest, "size_bytes": self.size_bytes, "role": str(self.role)}


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """What a run of layers has become. `below`: how many of `layers` lie in SIFs below this."""

    layers: tuple[str, ...]
    below: int
    sif: SifRecord
    tree: ObjectRecord

    def node(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "layers": list(self.layers),
            "below": self.below,
            "sif": self.sif.node(),
            "tree": self.tree.node(),
        }


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """`sifs`: base first. `source_bytes`: its layers as they were stored at the source."""

    image: str | None
    architecture: str
    layers: Layers
    sifs: tuple[SifRecord, ...]
    source_bytes: int

    def node(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "image": self.image,
            "architecture": self.architecture,
            "layers": str(self.layers),
            "sifs": [sif.node() for sif in self.sifs],
            "source_bytes": self.source_bytes,
        }


@dataclass(frozen=True, slots=True)
class NameRecord:
    name: str
    image: str
    manifest_digest: str | None

    def node(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "name": self.name,
            "image": self.image,
            "manifest_digest": self.manifest_digest,
        }


def parse_build(node: Any) -> BuildRecord:
    """Any of these raises StoreDamaged for what it does not understand."""
    with _Parsing("a build's record"):
        _check_version(node)
        return BuildRecord(
            layers=tuple(_text(one) for one in node["layers"]),
            below=_count(node["below"]),
            sif=_sif(node["sif"]),
            tree=ObjectRecord(_digest(node["tree"]["digest"]), _count(node["tree"]["size_bytes"])),
        )


def parse_image(node: Any) -> ImageRecord:
    with _Parsing("an image's record"):
        _check_version(node)
        sifs = tuple(_sif(one) for one in node["sifs"])
        if not sifs:
            raise ValueError("an image of nothing")
        return ImageRecord(
            image=None if node["image"] is None else _text(node["image"]),
            architecture=_text(node["architecture"]),
            layers=Layers(node["layers"]),
            sifs=sifs,
            source_bytes=_count(node["source_bytes"]),
        )


def parse_name(node: Any) -> NameRecord:
    with _Parsing("a name's record"):
        _check_version(node)
        digest = node["manifest_digest"]
        return NameRecord(
            _text(node["name"]), _digest(node["image"]), None if digest is None else _text(digest)
        )


class _Parsing:
    """Turns what goes wrong with JSON of any shape into StoreDamaged."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, IndexError)):
            raise StoreDamaged(f"{self._what} is broken: {error!r}") from error


def _check_version(node: Any) -> None:
    if node["version"] != VERSION:
        raise ValueError(f"version {node['version']!r}")


def _sif(node: Any) -> SifRecord:
    return SifRecord(_digest(node["digest"]), _count(node["size_bytes"]), Role(node["role"]))


def _digest(node: Any) -> str:
    # It becomes a file name.
    if not isinstance(node, str) or not _DIGEST.fullmatch(node):
        raise ValueError(f"{str(node)[:80]!r} is no digest")
    return node


def _text(node: Any) -> str:
    if not isinstance(node, str):
        raise TypeError(f"{str(node)[:80]!r} is no string")
    return node


def _count(node: Any) -> int:
    if not isinstance(node, int) or isinstance(node, bool) or node < 0:
        raise ValueError(f"{str(node)[:80]!r} is no count")
    return node
