"""Files of a sandbox, in and out as streams, at constant memory.

A read is known to be good only at its end (R_EXIT), when its head may be on its way to the caller
already. So its first bytes are held back until all of them are there or ``HEAD_BYTES`` are: small
files fail with a clean error, large ones by a broken stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, Self

from sandboxd.init import protocol
from sandboxd.init.protocol import Exited, FileEntry, FileFlag, FileOp, ProtocolError
from sandboxd.model import FileInfo
from sandboxd.runtime.control import Control
from sandboxd.runtime.file_operation import DISCARD_S, FileOperation

HEAD_BYTES: Final = 256 * 1024
LENGTH_MAX: Final = (1 << 63) - 1


class Stream(FileOperation):
    """Bytes on their way out. After ``_fill_head``: ``head`` is their beginning, and all of them
    where ``complete``; ``rest`` gives what follows."""

    head: bytes = b""
    complete: bool = False

    async def _fill_head(self, begin: bytes = b"") -> None:
        head = bytearray(begin)
        while len(head) < HEAD_BYTES:
            data = await self._read()
            if not data:
                await self.finished()
                self.complete = True
                break
            head += data
        self.head = bytes(head)

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows ``head``. Raises like ``open`` when reading failed on the way."""
        if not self.complete:
            while data := await self._read():
                yield data
            await self.finished()
            self.complete = True


class FileRead(Stream):
    """A regular file on its way out; ``info`` is what it was when it was opened."""

    info: FileInfo
    inode: int

    @classmethod
    async def open(
        cls,
        control: Control,
        *,
        user: str,
        path: str | bytes,
        offset: int = 0,
        length: int | None = None,
        suffix: bool = False,
    ) -> Self:
        """``length`` bytes from ``offset``, or with ``suffix`` the last ``length``.

        Not beyond the size it has now, but for a file of proc, which says it has none.
        Raises FileNotFound, FileAccessDenied, NotARegularFile, UserNotFound …
        """
        read = cls(control, user, _raw(path))
        read._start(
            FileOp.FILE_READ,
            flags=FileFlag.FILE_ENTRY | (FileFlag.FILE_SUFFIX if suffix else 0),
            offset=offset,
            length=LENGTH_MAX if length is None else length,
        )
        try:
            entry, begin = await read._entry()
            read.info = _info(entry)
            read.inode = entry.inode
            await read._fill_head(begin)
        except BaseException:
            read.close()
            raise
        return read

    async def _entry(self) -> tuple[FileEntry, bytes]:
        data = b""
        try:
            while (found := protocol.unpack_entry(data)) is None:
                more = await self._read()
                if not more:
                    await self.finished()
                    raise ProtocolError("a read without an entry")  # noqa: TRY301
                data += more
        except ProtocolError as error:
            raise self._broken(error) from error
        entry, end = found
        return entry, data[end:]


class FileWrite(FileOperation):
    """A file on its way in: ``open``, ``write``, ``finish``. ``close`` it in any case (a context
    manager): a file that was not finished is not put in place."""

    _chunked = False

    @classmethod
    def open(
        cls,
        control: Control,
        *,
        user: str,
        path: str | bytes,
        length: int | None,
        length_max: int = LENGTH_MAX,
        mode: int | None = None,
        owner: str = "",
        parents: bool = True,
    ) -> Self:
        """``length`` bytes exactly; where that is None, what is written until ``finish``, of at
        most ``length_max``. ``owner``: ``name|uid[:name|gid]``; else the replaced file's or the
        user's."""
        write = cls(control, user, _raw(path), owner.encode())
        write._chunked = length is None
        flags = FileFlag.FILE_CHUNKED if length is None else FileFlag(0)
        if parents:
            flags |= FileFlag.FILE_PARENTS
        if mode is not None:
            flags |= FileFlag.FILE_MODE
        write._start(
            FileOp.FILE_WRITE,
            flags=flags,
            mode=mode or 0,
            length=length_max if length is None else length,
        )
        return write

    async def write(self, data: bytes | memoryview) -> bool:
        if self._chunked:
            if not data:  # which would be the end
                return True
            data = len(data).to_bytes(4, "little") + data
        return await super().write(data)

    def close(self) -> None:
        """Let go of the pipe. At its end the child removes what it has written so far, which a kill
        would leave where files cannot be without a name: so it is killed only if it does not end by
        itself."""
        self._close_fds()
        if not self.exited.done():
            self._loop.call_later(DISCARD_S, self._kill)

    async def finish(self) -> FileInfo:
        """The file as it is now. Raises like ``FileRead.open``, and DiskFull."""
        if self._chunked:
            await super().write(bytes(4))
        self._close_fd()
        return _info(await self.finished())


def _raw(path: str | bytes) -> bytes:
    return path.encode() if isinstance(path, str) else path


def _info(of: Exited | FileEntry) -> FileInfo:
    return FileInfo(
        size_bytes=of.size,
        mode=of.mode & 0o7777,
        uid=of.uid,
        gid=of.gid,
        mtime_ns=of.mtime_ns,
    )
