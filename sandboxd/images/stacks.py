"""Images of a store that ``sif-tools convert --store`` has filled: a base, and what lies on it.

A name is found by its digest, never by listing. Published files never change, so what was checked
once needs no more than a look whether it is still there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import sif_tools
from sandboxd.errors import ImageInvalid, ImageUnavailable
from sandboxd.images.checked import (
    CheckedImage,
    KnownImage,
    file_key,
    refusals,
    usable_config,
)
from sif_tools.errors import BadName, NotAStore, NotInStore, StoreDamaged, StoreUnreadable
from sif_tools.partition import mountable_overlay
from sif_tools.store.delta_object import read_delta
from sif_tools.store.files import open_published
from sif_tools.store.layout import Area, is_store, open_store, unquoted
from sif_tools.store.lookup import StoredSif, files_in, find_image


def find(images_dir: Path, name: str) -> Sequence[StoredSif] | None:
    """The SIFs of an image, base first; None where the directory is no store, or has no such name.

    Raises ImageUnavailable where the store cannot be read.
    """
    try:
        if not is_store(images_dir):
            return None
        return find_image(open_store(images_dir), name)[1]
    except (NotInStore, BadName):
        return None
    except (NotAStore, StoreDamaged, StoreUnreadable) as error:
        raise ImageUnavailable(
            f"image {name!r} cannot be looked up: {error.message}", hint=error.hint
        ) from error


def check(name: str, sifs: Sequence[StoredSif], known: CheckedImage | None) -> CheckedImage:
    """Look at every SIF of an image, unless they are the ``known`` ones.

    Raises ImageInvalid, ImageUnavailable.
    """
    with ExitStack() as stack:
        fds = []
        for sif in sifs:
            fds.append(open_sif(name, str(sif.path)))
            stack.callback(os.close, fds[-1])
        keys = [file_key(os.fstat(fd)) for fd in fds]
        if known is not None and [one.key for one in (*known.below, known)] == keys:
            return known
        parts: list[CheckedImage] = []
        with refusals(name):
            for sif, fd, key in zip(sifs, fds, keys, strict=True):
                # What lies below is not this image's alone.
                called = name if sif is sifs[-1] else f"sha256:{sif.digest}"
                parts.append(_part(called, sif, fd, key, parts))
        return parts[-1]


def _part(
    name: str, sif: StoredSif, fd: int, key: str, below: Sequence[CheckedImage]
) -> CheckedImage:
    parsed = sif_tools.read_sif(fd)
    if not below:
        partition = sif_tools.mountable_partition(parsed, fd)
    else:
        partition = mountable_overlay(parsed, fd)
        try:
            said = read_delta(parsed, fd).get("below")
        except ValueError as error:
            raise ImageInvalid(f"image {name!r}: {error}") from error
        # A shared part says nothing of what it lies on; the image's own says all of it.
        if said is not None and said != [f"sha256:{one.digest}" for one in below]:
            raise ImageInvalid(f"image {name!r}: its delta belongs on another base")
    config = sif_tools.image_config(parsed, fd)
    return CheckedImage(
        name=name,
        key=key,
        sif_offset=partition.offset_bytes,
        size_bytes=sif.size_bytes + sum(one.size_bytes for one in below),
        config=usable_config(config),
        path=str(sif.path),
        digest=sif.digest,
        below=tuple(below),
    )


def open_sif(name: str, path: str) -> int:
    """Open a SIF of a store. Raises ImageUnavailable: its record says that it is there."""
    try:
        return open_published(Path(path))
    except OSError as error:
        raise ImageUnavailable(
            f"image {name!r} cannot be opened: {os.strerror(error.errno or errno.EIO).lower()}"
        ) from error


def known(images_dir: Path, most: int) -> list[KnownImage] | None:
    """The names in a store, ``most`` at most and then any; None where there is no store."""
    if not is_store(images_dir):
        return None
    found: list[KnownImage] = []
    try:
        for path in files_in(open_store(images_dir), Area.NAMES):
            found.append(KnownImage(unquoted(path.name), None, path.stat().st_mtime))
            if len(found) >= most:
                break
    except (OSError, NotAStore):
        pass  # what cannot be listed cannot be used either
    return sorted(found, key=lambda image: image.name)
