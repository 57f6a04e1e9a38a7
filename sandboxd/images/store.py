"""From an image's name to a checked SIF file: ``NAME`` is ``IMAGES_DIR/NAME.sif``.

The directory is the operator's and no sandbox can write there, so a symbolic link in it (to a
shared store, say) is followed; what a caller may choose is only a name of a strict grammar, which
has no way out of the directory. Reads files, so it belongs in a thread: a store may be a network
file system that does not answer.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import sif_tools
from sandboxd.errors import ImageInvalid, ImageNotFound, ImageUnavailable
from sandboxd.model import ImageConfig

NAME_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*"
"""No empty component, none that starts with a dot, so neither ``..`` nor an absolute path."""

NAME_MAX: Final = 255

REVALIDATE_S: Final = 2.0
"""For so long a checked image is taken at its word: a rollout creates many sandboxes of one image,
and a hop to a thread costs more than all else between the socket and the launcher."""

LIST_MAX: Final = 10_000
SUFFIX: Final = ".sif"

_NAME: Final = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """A SIF whose primary partition this node may mount."""

    name: str
    key: str
    """Names the very file, not only its name: another file of that name has another key."""
    sif_offset: int
    size_bytes: int
    config: ImageConfig


@dataclass(frozen=True, slots=True)
class KnownImage:
    """A file in the store, unchecked."""

    name: str
    size_bytes: int
    modified_at: float


@dataclass(slots=True)
class _Entry:
    image: CheckedImage
    checked_at: float


class ImageStore:
    """Looks images up and remembers what it found. Everything async runs its reads in a thread."""

    ENTRIES_MAX: Final = 4096

    def __init__(self, images_dir: str | os.PathLike[str]) -> None:
        self._dir = Path(images_dir)
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
        fd = self._open(name)
        try:
            status = os.fstat(fd)
            key = _key(status)
            entry = self._entries.get(name)
            if entry is None or entry.image.key != key:
                entry = _Entry(_inspect(fd, name, key, status.st_size), 0.0)
            entry.checked_at = time.monotonic()
        finally:
            os.close(fd)
        self._entries.pop(name, None)
        while len(self._entries) >= self.ENTRIES_MAX:
            self._entries.pop(next(iter(self._entries)), None)
        self._entries[name] = entry
        return entry.image

    def _open_checked(self, image: CheckedImage) -> int:
        fd = self._open(image.name)
        if _key(os.fstat(fd)) != image.key:
            os.close(fd)
            self._entries.pop(image.name, None)
            raise ImageUnavailable(f"image {image.name!r} was replaced just now")
        return fd

    def _open(self, name: str) -> int:
        if len(name) > NAME_MAX or not _NAME.fullmatch(name):
            raise ImageNotFound(
                f"{name!r} is not an image name", hint=f"a name looks like {NAME_PATTERN}"
            )
        try:
            # Non-blocking: a FIFO of that name must not hold the thread.
            fd = os.open(self._dir / (name + SUFFIX), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ImageNotFound(
                f"no image {name!r} on this node",
                hint="GET /v1/images lists what is there; a name has no .sif at its end",
            ) from error
        except OSError as error:
            raise ImageUnavailable(
                f"image {name!r} cannot be opened: {os.strerror(error.errno or errno.EIO).lower()}"
            ) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ImageInvalid(f"image {name!r} is not a regular file")
        return fd

    def _known(self) -> list[KnownImage]:
        found: list[KnownImage] = []
        pending = [""]
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


def _key(status: os.stat_result) -> str:
    identity = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _inspect(fd: int, name: str, key: str, size_bytes: int) -> CheckedImage:
    try:
        sif = sif_tools.read_sif(fd)
        partition = sif_tools.mountable_partition(sif, fd)
        config = sif_tools.image_config(sif, fd)
    except sif_tools.Unreadable as error:
        raise ImageUnavailable(f"image {name!r} cannot be read: {error.message}") from error
    except sif_tools.SifError as error:
        raise ImageInvalid(
            f"image {name!r}: {error.message}", hint=error.hint, sif_code=error.code
        ) from error
    return CheckedImage(
        name=name,
        key=key,
        sif_offset=partition.offset_bytes,
        size_bytes=size_bytes,
        config=_usable(
            ImageConfig(
                env=config.env,
                workdir=config.working_dir or "/",
                user=config.user or "0",
                labels=config.labels,
            )
        ),
    )


def _usable(config: ImageConfig) -> ImageConfig:
    """Without what no program could be started with: entries that are no ``NAME=value``."""
    env = tuple(entry for entry in config.env if "=" in entry[1:] and "\0" not in entry)
    workdir = config.workdir if config.workdir.startswith("/") else "/" + config.workdir
    return replace(config, env=env, workdir=workdir)
