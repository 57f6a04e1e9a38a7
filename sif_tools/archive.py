"""A tar file as a store of named files: for archives that hold images, not for layers.

The headers are read once, content is passed over; a compressed archive is first inflated into a
temporary file without a name, under the limits. Nothing is unpacked. Implements `LayoutFiles`.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from sif_tools.compression import decompressed
from sif_tools.errors import BadLayout, BadSource
from sif_tools.limits import Limits
from sif_tools.merge import names
from sif_tools.scratch import scratch_file
from sif_tools.tarstream.chunks import FileCursor
from sif_tools.tarstream.entry import Kind
from sif_tools.tarstream.reader import TarReader

_MAX_LINKS: Final = 8
_PLAIN_MAGIC: Final = (b"ustar\0", b"ustar ")


@dataclass(frozen=True, slots=True)
class _Member:
    """A range of the archive, or the name that a link leads to."""

    offset_bytes: int = 0
    size_bytes: int = 0
    target: bytes | None = None


class ArchiveFiles:
    """Files of a tar by name; symlinks and hard links among them are followed."""

    def __init__(self, path: Path, limits: Limits, resources: ExitStack) -> None:
        """BadSource where the file cannot be read, BadLayout or BadLayer where it is no tar."""
        self.name = str(path)
        try:
            file = resources.enter_context(path.open("rb"))
            self._fd = _plain(file, limits, resources).fileno()
            self._members = self._index(limits)
        except OSError as error:
            raise BadSource(f"{path}: {error.strerror}") from error

    def _index(self, limits: Limits) -> dict[bytes, _Member]:
        cursor = FileCursor(self._fd)
        reader = TarReader(cursor)
        members: dict[bytes, _Member] = {}
        for number, entry in enumerate(reader):
            limits.check_content(number, 0)
            path = names.normalise(entry.path)
            if entry.kind is Kind.FILE:
                if reader.is_sparse:
                    raise BadLayout("a file of the archive is stored sparse", entry=path)
                members[path] = _Member(cursor.position, entry.size_bytes)
            elif entry.kind is Kind.SYMLINK:
                target = posixpath.join(posixpath.dirname(path), entry.link_target)
                members[path] = _Member(target=posixpath.normpath(target))
            elif entry.kind is Kind.HARDLINK:
                members[path] = _Member(target=names.normalise(entry.link_target))
        return members

    def __contains__(self, name: str) -> bool:
        return name.encode() in self._members

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """The file; FileNotFoundError where there is none, ELOOP where links do not end."""
        member = self._find(name)
        yield cast(BinaryIO, _Range(self._fd, member.offset_bytes, member.size_bytes))

    def size_bytes(self, name: str) -> int:
        return self._find(name).size_bytes

    def _find(self, name: str) -> _Member:
        path = name.encode("utf-8", "surrogateescape")
        for _ in range(_MAX_LINKS):
            member = self._members.get(path)
            if member is None:
                raise FileNotFoundError(errno.ENOENT, "not in the archive", name)
            if member.target is None:
                return member
            path = member.target
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)


class _Range(io.RawIOBase):
    """Bytes of a file from one place on, read in order, without moving the file's position."""

    def __init__(self, fd: int, offset_bytes: int, size_bytes: int) -> None:
        self._fd = fd
        self._at = offset_bytes
        self._end = offset_bytes + size_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = self._end - self._at
        data = os.pread(self._fd, left if size < 0 else min(size, left), self._at)
        if not data and left and size:
            raise OSError(errno.EIO, "the archive became shorter")
        self._at += len(data)
        return data


def _plain(file: BinaryIO, limits: Limits, resources: ExitStack) -> BinaryIO:
    """The archive itself, or a temporary file with its inflated bytes."""
    head = os.pread(file.fileno(), 512, 0)
    if head[257:263] in _PLAIN_MAGIC or not any(head):
        return file
    spool = resources.enter_context(scratch_file("the inflated archive"))
    stored, inflated = os.fstat(file.fileno()).st_size, 0
    for chunk in decompressed(file.read):
        inflated += len(chunk)
        limits.check_inflated(inflated, stored)
        spool.write(chunk)
    spool.flush()
    return spool
