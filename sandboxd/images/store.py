"""From an image's name to checked SIF files: ``NAME`` is ``IMAGES_DIR/NAME.sif``.

Where IMAGES_DIR is a store that ``sif-tools convert --store`` has filled, it is also what that has
under the name: one SIF, or a base and what is laid over it (``stacks``).

The directory is the operator's and no sandbox can write there, so a symbolic link in it (to a
shared store, say) is followed; what a caller may choose is only a name of a strict grammar, which
has no way out of the directory. Reads files, so it belongs in a thread: a store may be a network
file system that does not answer.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.errors import ImageInvalid, ImageNotFound, ImageUnavailable
from sandboxd.images import stacks
from sandboxd.images.checked import CheckedImage, KnownImage, file_key, inspect
from sif_tools.store.files import open_published

__all__ = ["CheckedImage", "ImageStore", "KnownImage"]

NAME_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._:@-]*(/[A-Za-z0-9][A-Za-z0-9._:@-]*)*"
"""No empty component, none that starts with a dot, so neither ``..`` nor an absolute path. Colons
and at signs are for a registry's port, a tag, a digest."""

NAME_MAX: Final = 255

REVALIDATE_S: Final = 2.0
"""For so long a checked image is taken at its word: a rollout creates many sandboxes of one image,
and a hop to a thread costs more than all else between the socket and the launcher."""

LIST_MAX: Final = 10_000
SUFFIX: Final = ".sif"

_NAME: Final = re.compile(NAME_PATTERN)


@dataclass(slots=True)
class _Entry:
    image: CheckedImage
    checked_at: float


class ImageStore:
    """Looks images up and remembers what it found. Everything async runs its reads in a thread."""

    ENTRIES_MAX: Final = 4096

    def __init__(self, images_dir: str | os.PathLike[str]) -> None:
        self.directory = self._dir = Path(images_dir)
        self._entries: dict[str, _Entry] = {}

    async def check(self, name: str) -> CheckedImage:
        """The image of that name. Raises ImageNotFound, ImageInvalid or ImageUnavailable."""
        entry = self._entries.get(name)
        if entry is not None and time.monotonic() - entry.checked_at < REVALIDATE_S:
            return entry.image
        return await asyncio.to_thread(self.check_now, name)

    async def open(self, image: CheckedImage) -> int:
        """The very file that was checked, read-only. Raises like ``check``, and ImageUnavailable
        when the file was replaced since."""
        return await asyncio.to_thread(self._open_checked, image)

    async def known(self) -> list[KnownImage]:
        """What lies in the store, by name; LIST_MAX at most."""
        return await asyncio.to_thread(self._known)

    # --- in a thread -------------------------------------------------------------------------

    def check_now(self, name: str) -> CheckedImage:
        """``check``, blocking."""
        entry = self._entries.get(name)
        known = None if entry is None else entry.image
        try:
            image = self._check_file(name, known)
        except ImageNotFound:
            found = stacks.find(self._dir, name)
            if found is None:
                raise
            image = stacks.check(name, found, known)
        entry = _Entry(image, time.monotonic())
        self._entries.pop(name, None)
        while len(self._entries) >= self.ENTRIES_MAX:
            self._entries.pop(next(iter(self._entries)), None)
        self._entries[name] = entry
        return entry.image

    def _check_file(self, name: str, known: CheckedImage | None) -> CheckedImage:
        fd = self._open(name)
        try:
            status = os.fstat(fd)
            key = file_key(status)
            if known is not None and known.key == key:
                return known
            return inspect(fd, name, key, status.st_size)
        finally:
            os.close(fd)

    def remembered(self, name: str) -> CheckedImage | None:
        """What was found when the image was last looked at, if that was in this daemon's time."""
        entry = self._entries.get(name)
        return None if entry is None else entry.image

    def open_now(self, image: CheckedImage) -> int:
        """``open``, blocking."""
        return self._open_checked(image)

    def _open_checked(self, image: CheckedImage) -> int:
        fd = stacks.open_sif(image.name, image.path) if image.path else self._open(image.name)
        if file_key(os.fstat(fd)) != image.key:
            os.close(fd)
            self._forget(image.key)
            raise ImageUnavailable(f"image {image.name!r} was replaced just now")
        return fd

    def _forget(self, key: str) -> None:
        """Every image that a file is part of: whoever asks next has it looked at again."""
        for name, entry in list(self._entries.items()):
            if any(part.key == key for part in (*entry.image.below, entry.image)):
                self._entries.pop(name, None)

    def _open(self, name: str) -> int:
        if len(name) > NAME_MAX or not _NAME.fullmatch(name):
            raise ImageNotFound(
                f"{name!r} is not an image name", hint=f"a name looks like {NAME_PATTERN}"
            )
        try:
            fd = open_published(self._dir / (name + SUFFIX))
        except OSError as error:
            # A name that no file can have is the name of none; a store that is not there has none
            # of its images for now, and no policy may be told that it asked for a wrong one.
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                if not self._dir.is_dir():
                    raise ImageUnavailable(
                        f"image {name!r} cannot be opened: the node's image store is not there"
                    ) from error
                raise ImageNotFound(
                    f"no image {name!r} on this node",
                    hint="GET /v1/images lists what is there; a name has no .sif at its end",
                ) from error
            raise ImageUnavailable(
                f"image {name!r} cannot be opened: {os.strerror(error.errno or errno.EIO).lower()}"
            ) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ImageInvalid(f"image {name!r} is not a regular file")
        return fd

    def _known(self) -> list[KnownImage]:
        found = stacks.known(self._dir, LIST_MAX)
        # A store's own directories hold no file by an image's name.
        pending = [] if found is not None else [""]
        found = found or []
        while pending and len(found) < LIST_MAX:
            prefix = pending.pop()
            try:
                with os.scandir(self._dir / prefix) as entries:
                    for entry in entries:
                        name = prefix + entry.name
                        if entry.is_dir():
                            if _NAME.fullmatch(name) and name.count("/") < 8:
                                pending.append(name + "/")
                            continue
                        stem = name.removesuffix(SUFFIX)
                        if stem == name or not _NAME.fullmatch(stem) or not entry.is_file():
                            continue
                        status = entry.stat()
                        found.append(KnownImage(stem, status.st_size, status.st_mtime))
                        if len(found) >= LIST_MAX:
                            break
            except OSError:
                # A directory that vanished or is closed to us holds no image that could be used.
                continue
        return sorted(found, key=lambda image: image.name)
