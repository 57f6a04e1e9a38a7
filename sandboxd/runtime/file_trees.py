"""Directories of a sandbox: looked at, searched, made, removed, moved, their modes and owners."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.errors import FileKilled
from sandboxd.init import protocol
from sandboxd.init.protocol import (
    EVERYTHING,
    Exited,
    FileFilter,
    FileFlag,
    FileOp,
    ProtocolError,
    errno_symbol,
)
from sandboxd.model import FileEntry
from sandboxd.runtime.control import Control
from sandboxd.runtime.file_operation import TREE_S, FileOperation

DEPTH_MAX: Final = 2048
"""Levels of one-letter names in the longest path."""
LOOKED_AT_MAX: Final = 2_000_000
"""Entries that one search goes through; it says that it was cut there."""
CHANGED_MAX: Final = 16_777_216

TYPES: Final = {
    "file": stat.S_IFREG,
    "directory": stat.S_IFDIR,
    "symlink": stat.S_IFLNK,
    "fifo": stat.S_IFIFO,
    "socket": stat.S_IFSOCK,
    "char-device": stat.S_IFCHR,
    "block-device": stat.S_IFBLK,
}
_TYPE_NAMES: Final = {kind: name for name, kind in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Listing:
    """Sorted by path. ``truncated``: there are more that were not looked at."""

    entries: list[FileEntry]
    truncated: bool


class TreeOperation(FileOperation):
    """An operation that answers with entries; how many is for its caller to bound."""

    stall_s = TREE_S

    def __init__(self, control: Control, user: str, path: bytes, other: bytes = b"") -> None:
        super().__init__(control, user, path, other)
        self.entries: list[protocol.FileEntry] = []

    async def run(self, op: FileOp, entries_max: int = 2, **request: Any) -> Exited:
        """Raises the error that its failure means, and FileKilled or SandboxLost where what came
        cannot be."""
        with self:
            self._start(op, **request)
            data = bytearray()
            try:
                while more := await self._read():
                    data += more
                    self._take(data)
                    if len(self.entries) > entries_max:
                        raise ProtocolError(f"more than {entries_max} entries")  # noqa: TRY301
            except ProtocolError as error:
                raise self._broken(error) from error
            if self.entries and self.entries[-1].err:
                self.place = self.entries[-1].path
            exited = await self.finished()
            if data:
                raise FileKilled("the file operation ended within an entry")
            return exited

    def _take(self, data: bytearray) -> None:
        at = 0
        while (found := protocol.unpack_entry(data, at)) is not None:
            entry, at = found
            self.entries.append(entry)
        del data[:at]


@dataclass(frozen=True, slots=True)
class FileTrees:
    """What can be done to the names in one sandbox, as one user.

    ``watch`` is told each operation as it starts, so that it can be abandoned. Paths are absolute.
    Every method raises SandboxdError: FileNotFound, FileAccessDenied, NotADirectory, FileStalled …
    """

    control: Control
    user: str
    watch: Callable[[FileOperation], None] = lambda _: None

    def _operation(self, path: bytes, other: bytes = b"") -> TreeOperation:
        operation = TreeOperation(self.control, self.user, path, other)
        self.watch(operation)
        return operation

    async def stat(self, path: bytes, *, follow: bool = False) -> FileEntry:
        operation = self._operation(path)
        await operation.run(FileOp.FILE_STAT, flags=FileFlag.FILE_FOLLOW if follow else 0)
        return _only(operation, path)

    async def list(
        self, path: bytes, *, depth: int, limit: int, filter: FileFilter = EVERYTHING
    ) -> Listing:
        """What is below a directory, ``depth`` levels and ``limit`` entries at most. Other file
        systems are named and not entered."""
        operation = self._operation(path)
        await operation.run(
            FileOp.FILE_LIST,
            limit + 1,
            depth=depth,
            length=LOOKED_AT_MAX,
            entries=limit,
            filter=filter,
        )
        found = operation.entries
        truncated = bool(found) and found[-1].err != 0 and not found[-1].path
        if truncated:
            found = found[:-1]
        base = path.rstrip(b"/") + b"/"
        entries = [_entry(one, base + one.path) for one in found]
        return Listing(sorted(entries, key=lambda one: one.path), truncated)

    async def mkdir(self, path: bytes, *, mode: int | None, parents: bool) -> FileEntry:
        """With ``parents`` a directory that is there is fine, and stays as it is."""
        flags = FileFlag.FILE_PARENTS if parents else FileFlag(0)
        if mode is not None:
            flags |= FileFlag.FILE_MODE
        operation = self._operation(path)
        await operation.run(FileOp.FILE_MKDIR, flags=flags, mode=mode or 0)
        return _only(operation, path)

    async def remove(self, path: bytes, *, recursive: bool) -> int:
        """How many entries are gone. A symlink is removed itself. What fails ends it on the way."""
        exited = await self._operation(path).run(
            FileOp.FILE_REMOVE,
            flags=FileFlag.FILE_RECURSIVE if recursive else 0,
            entries=CHANGED_MAX,
        )
        return exited.size

    async def move(
        self, source: bytes, destination: bytes, *, overwrite: bool, parents: bool
    ) -> FileEntry:
        """rename(2): in one step. To another file system a file is copied; a directory is not."""
        flags = FileFlag.FILE_REPLACE if overwrite else FileFlag(0)
        if parents:
            flags |= FileFlag.FILE_PARENTS
        operation = self._operation(source, destination)
        await operation.run(FileOp.FILE_MOVE, flags=flags)
        return _only(operation, destination)

    async def chmod(self, path: bytes, *, mode: int, recursive: bool) -> tuple[FileEntry, int]:
        """The entry as it is now, and how many were changed. Symlinks below it are passed over."""
        return await self._change(FileOp.FILE_CHMOD, path, b"", recursive, mode=mode)

    async def chown(self, path: bytes, *, owner: str, recursive: bool) -> tuple[FileEntry, int]:
        """``owner``: ``name|uid[:name|gid]``; without a group only the owner changes."""
        return await self._change(FileOp.FILE_CHOWN, path, owner.encode(), recursive)

    async def _change(
        self, op: FileOp, path: bytes, other: bytes, recursive: bool, mode: int = 0
    ) -> tuple[FileEntry, int]:
        operation = self._operation(path, other)
        exited = await operation.run(
            op,
            flags=FileFlag.FILE_RECURSIVE if recursive else 0,
            mode=mode,
            depth=DEPTH_MAX,
            entries=CHANGED_MAX,
        )
        return _only(operation, path), exited.size


def _only(operation: TreeOperation, path: bytes) -> FileEntry:
    if len(operation.entries) != 1:
        raise FileKilled("the file operation ended without an answer")
    return _entry(operation.entries[0], path)


def _entry(raw: protocol.FileEntry, path: bytes) -> FileEntry:
    kind = stat.S_IFMT(raw.mode)
    return FileEntry(
        path=path,
        type=_TYPE_NAMES.get(kind, "unknown"),
        size_bytes=raw.size,
        mode=raw.mode & 0o7777,
        uid=raw.uid,
        gid=raw.gid,
        links=raw.nlink,
        inode=raw.inode,
        mtime_ns=raw.mtime_ns,
        target=raw.target if kind == stat.S_IFLNK else None,
        error=errno_symbol(raw.err) if raw.err else None,
    )
