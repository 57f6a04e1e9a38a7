"""From a name to the SIFs of an image: all that a node needs of a store. Only reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sif_tools.errors import NotInStore, StoreUnreadable
from sif_tools.store.files import read_json
from sif_tools.store.layout import Area, Layout, Suffix, unquoted
from sif_tools.store.records import (
    BuildRecord,
    ImageRecord,
    NameRecord,
    parse_build,
    parse_image,
    parse_name,
)


@dataclass(frozen=True, slots=True)
class StoredSif:
    """One file of an image. `path` is where it lies now; open it with `files.open_published`."""

    path: Path
    digest: str
    size_bytes: int


def find_image(layout: Layout, name: str) -> tuple[ImageRecord, tuple[StoredSif, ...]]:
    """The image of a name, and its SIFs, base first. Three small reads, whatever the store holds.

    Raises NotInStore, StoreDamaged, StoreUnreadable.
    """
    found = name_record(layout, name)
    if found is None:
        raise NotInStore(f"the store has no image {name!r}")
    image = image_record(layout, found.image)
    if image is None:
        raise NotInStore(f"{name!r} stands for image {found.image[:12]}…, which is gone")
    return image, stored_sifs(layout, image)


def stored_sifs(layout: Layout, image: ImageRecord) -> tuple[StoredSif, ...]:
    return tuple(
        StoredSif(layout.object(sif.digest, Suffix.SIF), sif.digest, sif.size_bytes)
        for sif in image.sifs
    )


def is_complete(layout: Layout, image: ImageRecord) -> bool:
    """Whether every SIF of the image is there with the size it should have."""
    for sif in image.sifs:
        try:
            if os.stat(layout.object(sif.digest, Suffix.SIF)).st_size != sif.size_bytes:
                return False
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreUnreadable(f"{layout.root}: {error.strerror}") from error
    return True


def name_record(layout: Layout, name: str) -> NameRecord | None:
    node = _read(layout.name(name))
    return None if node is None else parse_name(node)


def image_record(layout: Layout, key: str) -> ImageRecord | None:
    node = _read(layout.image(key))
    return None if node is None else parse_image(node)


def build_record(layout: Layout, key: str) -> BuildRecord | None:
    node = _read(layout.build(key))
    return None if node is None else parse_build(node)


def names(layout: Layout) -> Iterator[str]:
    """Every name, in no order that means anything. Reads directories only, one shard at a time."""
    for path in files_in(layout, Area.NAMES):
        yield unquoted(path.name)


def files_in(layout: Layout, area: Area) -> Iterator[Path]:
    """Every published file of a sharded area. What vanishes meanwhile is left out."""
    for path in all_files_in(layout, area):
        if not path.name.startswith("."):
            yield path


def all_files_in(layout: Layout, area: Area) -> Iterator[Path]:
    """The same, with what is being written or was left behind."""
    for first in _listed(layout.root / area):
        for second in _listed(first):
            yield from _listed(second)


def _listed(directory: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(directory / name for name in os.listdir(directory))
    return []


def _read(path: Path) -> object:
    try:
        return read_json(path)
    except OSError as error:
        raise StoreUnreadable(f"{path}: {error.strerror}") from error
