"""A directory as a layer: `rootfs:DIR`, walked in a fixed order, nothing followed.

What is there goes in as it is: `.wh.` names are only names here. Sockets are left out, as tar
does: without the process behind them they are nothing. Needs no root, but can take only what it
may read, and says which file that is not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sif_tools.errors import BadEntry, BadSource
from sif_tools.merge.merger import Pass, Progress
from sif_tools.tarstream.entry import (
    NO_XATTRS,
    XATTR_KINDS,
    Entry,
    EntryStream,
    Kind,
    Piece,
    is_kept_xattr,
)
from sif_tools.tarstream.sparse import zeros

_READ_BYTES: Final = 512 << 10
_MAX_MTIME: Final = (1 << 32) - 1
_KINDS: Final = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFCHR: Kind.CHAR_DEVICE,
    stat.S_IFBLK: Kind.BLOCK_DEVICE,
    stat.S_IFIFO: Kind.FIFO,
}


class DirectoryLayer:
    """Implements `Layer`. Progress counts the bytes of regular files."""

    has_whiteouts = False

    def __init__(self, directory: Path) -> None:
        try:
            is_directory = stat.S_ISDIR(os.stat(directory).st_mode)
        except OSError as error:
            raise BadSource(f"{directory}: {error.strerror}") from error
        if not is_directory:
            raise BadSource(f"{directory} is not a directory")
        self.name = f"directory {directory}"
        self._root = os.fsencode(directory)
        self.size_bytes = 0

    @contextmanager
    def open(self, which: Pass, progress: Progress | None = None) -> Iterator[EntryStream]:
        walk = _Walk(self._root, progress if which is Pass.EMIT else None)
        yield walk
        self.size_bytes = walk.done_bytes


class _Walk:
    """One pass over the directory; implements `EntryStream`."""

    def __init__(self, root: bytes, progress: Progress | None) -> None:
        self._root = root
        self._progress = progress
        self._device = 0
        self._current = b""
        self._current_size = 0
        self._first_names: dict[tuple[int, int], bytes] = {}
        self.done_bytes = 0

    def __iter__(self) -> Iterator[Entry]:
        """The root first, then each directory's names in byte order, before what is in them."""
        todo = [b""]
        while todo:
            path = todo.pop()
            try:
                entry = self._entry(path)
                below = self._names(path) if entry and entry.kind is Kind.DIRECTORY else []
            except OSError as error:
                raise BadEntry(f"{error.strerror}", entry=path) from error
            if entry is None:
                continue
            self._current, self._current_size = path, entry.size_bytes
            yield entry
            self.done_bytes += entry.size_bytes
            if self._progress is not None and entry.size_bytes:
                self._progress(self.done_bytes)
            prefix = path + b"/" if path else b""
            todo += [prefix + name for name in below]

    def data(self) -> Iterable[Piece]:
        """The current file's bytes; holes are not read."""
        try:
            fd = os.open(
                self._full(self._current),
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            )
        except OSError as error:
            raise BadEntry(f"{error.strerror}") from error
        try:
            yield from _content(fd, self._current_size)
        except OSError as error:
            raise BadEntry(f"{error.strerror}") from error
        finally:
            os.close(fd)

    def _full(self, path: bytes) -> bytes:
        return os.path.join(self._root, path) if path else self._root

    def _names(self, path: bytes) -> list[bytes]:
        return sorted(os.listdir(self._full(path)), reverse=True)

    def _entry(self, path: bytes) -> Entry | None:
        full = self._full(path)
        # The root may be given as a symlink; inside it nothing is followed.
        status = os.lstat(full) if path else os.stat(full)
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            return None
        if not path:
            self._device = status.st_dev
        elif status.st_dev != self._device:
            raise BadEntry(
                "another file system is mounted here",
                entry=path,
                hint="unmount it, or copy the tree to a directory of its own",
            )
        entry = Entry(
            path,
            kind,
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            status.st_gid,
            min(max(int(status.st_mtime), 0), _MAX_MTIME),
        )
        if kind is not Kind.DIRECTORY and status.st_nlink > 1:
            inode = (status.st_dev, status.st_ino)
            first = self._first_names.setdefault(inode, path)
            if first != path:
                entry.kind, entry.link_target = Kind.HARDLINK, first
                return entry
        if kind is Kind.FILE:
            entry.size_bytes = status.st_size
        elif kind is Kind.SYMLINK:
            entry.link_target = os.readlink(full)
        elif kind in (Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE):
            entry.major, entry.minor = os.major(status.st_rdev), os.minor(status.st_rdev)
        if kind in XATTR_KINDS:
            entry.xattrs = _xattrs(full) or NO_XATTRS
        return entry


def _xattrs(path: bytes) -> dict[bytes, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return {}
        raise
    return {
        os.fsencode(name): os.getxattr(path, name, follow_symlinks=False)
        for name in names
        if is_kept_xattr(os.fsencode(name))
    }


def _content(fd: int, size_bytes: int) -> Iterator[Piece]:
    at = 0
    while at < size_bytes:
        start = min(_seek(fd, at, os.SEEK_DATA, size_bytes), size_bytes)
        yield from zeros(start - at)
        at = start
        end = min(_seek(fd, at, os.SEEK_HOLE, size_bytes), size_bytes)
        while at < end:
            data = os.pread(fd, min(_READ_BYTES, end - at), at)
            if not data:
                return  # became shorter; the writer misses the bytes and says so
            at += len(data)
            yield data


def _seek(fd: int, at: int, whence: int, size_bytes: int) -> int:
    try:
        return os.lseek(fd, at, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:  # no more data: a hole up to the end
            return size_bytes
        raise
