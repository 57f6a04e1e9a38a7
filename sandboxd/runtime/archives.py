"""Directories of a sandbox as tar streams, and gzip around them.

The tar is written and read inside the sandbox, by a child of its PID 1 (``init/tar.c``,
``init/untar.c``): a parser of untrusted bytes then has the rights of the sandbox's user and no
more, its time is the sandbox's, and this process passes bytes on without looking at them. gzip is
HTTP's business and done here, in threads: it would hold the event loop for seconds.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Final, Self

from sandboxd.errors import ArchiveInvalid
from sandboxd.init.protocol import FileFilter, FileFlag, FileOp
from sandboxd.runtime.control import Control
from sandboxd.runtime.file_operation import TREE_S, FileOperation
from sandboxd.runtime.file_trees import DEPTH_MAX
from sandboxd.runtime.files import Stream

ENTRIES_MAX: Final = 1_000_000
GZIP: Final = 16 + zlib.MAX_WBITS
GZIP_LEVEL: Final = 3
PART_BYTES: Final = 256 * 1024
RATIO_MAX: Final = 250
"""gzip's own limit is 1,032; source trees are below 10, a log of one line repeated below 200."""
RATIO_FREE_BYTES: Final = 64 << 20
"""Below this no ratio is too high: it costs nothing."""


class ArchiveRead(Stream):
    """A directory's content on its way out, as a tar."""

    stall_s = TREE_S

    @classmethod
    async def open(
        cls,
        control: Control,
        *,
        user: str,
        path: bytes,
        filter: FileFilter,
        length_max: int,
        skip_unreadable: bool,
    ) -> Self:
        """Raises NotADirectory, FileAccessDenied, TreeTooLarge, FileChanged …"""
        read = cls(control, user, path)
        read._start(
            FileOp.FILE_PACK,
            flags=FileFlag.FILE_UNREADABLE if skip_unreadable else 0,
            depth=DEPTH_MAX,
            length=length_max,
            entries=ENTRIES_MAX,
            filter=filter,
        )
        try:
            await read._fill_head()
        except BaseException:
            read.close()
            raise
        return read


class ArchiveWrite(FileOperation):
    """A tar on its way into a directory: ``open``, ``write``, ``finish``; ``close`` in any case.
    What was put in place before it failed or broke off stays: each file of it is whole."""

    stall_s = TREE_S

    @classmethod
    def open(
        cls,
        control: Control,
        *,
        user: str,
        path: bytes,
        filter: FileFilter,
        length_max: int,
        owner: str = "",
        keep_owners: bool = False,
        parents: bool = True,
    ) -> Self:
        """``owner`` of what is made; with ``keep_owners`` the archive's own, by number; else the
        user."""
        write = cls(control, user, path, owner.encode())
        flags = FileFlag.FILE_PARENTS if parents else FileFlag(0)
        if keep_owners:
            flags |= FileFlag.FILE_OWNERS
        write._start(
            FileOp.FILE_UNPACK,
            flags=flags,
            depth=DEPTH_MAX,
            length=length_max,
            entries=ENTRIES_MAX,
            filter=filter,
        )
        return write

    async def finish(self) -> int:
        """How many members it had. Raises ArchiveInvalid, DiskFull, FileAccessDenied …"""
        self._close_fd()
        return (await self.finished()).size


async def gunzip(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What a gzip stream holds, all its members. Raises ArchiveInvalid for what is none, ends early
    or grows beyond all reason."""
    inflate = zlib.decompressobj(GZIP)
    taken = given = 0
    fresh = True
    async for data in body:
        taken += len(data)
        more = False
        while data or more:
            if inflate.eof:
                if not data.strip(b"\0"):
                    break  # padding, which gzip(1) passes over too
                inflate = zlib.decompressobj(GZIP)
            try:
                out = await asyncio.to_thread(inflate.decompress, data, PART_BYTES)
            except zlib.error as error:
                raise ArchiveInvalid(f"no gzip: {error}", reason="gzip", member=None) from error
            fresh = False
            given += len(out)
            if given > RATIO_FREE_BYTES and given > taken * RATIO_MAX:
                raise ArchiveInvalid(
                    f"more than {RATIO_MAX} times its compressed size", reason="ratio", member=None
                )
            if out:
                yield out
            more = len(out) == PART_BYTES and not inflate.eof
            data = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
    if fresh or not inflate.eof:
        raise ArchiveInvalid("the gzip stream ends early", reason="gzip", member=None)


async def gzip(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """``body``, compressed."""
    deflate = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP)
    async for data in body:
        if out := await asyncio.to_thread(deflate.compress, data):
            yield out
    yield deflate.flush()
