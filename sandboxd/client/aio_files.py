"""Files and directories of a sandbox, in asyncio: a part of ``AsyncSandbox``."""

from __future__ import annotations

import asyncio
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import BinaryIO, Unpack

from sandboxd.client import file_calls, local_tree
from sandboxd.client.aio_driver import AsyncDriver
from sandboxd.client.file_calls import FileEntry, FindOptions, Listing
from sandboxd.client.local_files import CHUNK_BYTES, replacing
from sandboxd.client.results import FileInfo


class AsyncSandboxFiles(ABC):
    """What a sandbox does with files; ``user`` is who does it, the sandbox's own if left out."""

    _client: AsyncDriver

    @property
    @abstractmethod
    def id(self) -> str:
        """The sandbox's."""

    async def read_file(
        self,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
    ) -> bytes:
        """From ``offset`` (below 0: from the end), ``length`` bytes at most. What has no size, as
        in ``/proc``, comes whole. Raises RangeNotSatisfiable for an offset past the end."""
        return await self._client.do(file_calls.read(self.id, path, user, offset, length))

    async def read_text(self, path: str, *, user: str | None = None) -> str:
        """Raises UnicodeDecodeError for what is no UTF-8."""
        return (await self.read_file(path, user=user)).decode()

    async def write_file(
        self,
        path: str,
        data: str | bytes,
        *,
        user: str | None = None,
        mode: int | None = None,
        owner: str | None = None,
        parents: bool = True,
    ) -> FileInfo:
        """Replace a file in one step: readers see the old or the new one."""
        raw = data.encode() if isinstance(data, str) else data
        return await self._client.do(
            file_calls.write(
                self.id,
                path,
                raw,
                len(raw),
                user=user,
                mode=mode,
                owner=owner,
                parents=parents,
            )
        )

    async def upload_file(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        user: str | None = None,
        mode: int | None = None,
        owner: str | None = None,
        parents: bool = True,
    ) -> FileInfo:
        """Copy a file of ours into the sandbox, at constant memory. Keeps its mode if none is
        given. Raises OSError for what concerns ours."""
        with open(source, "rb") as file:
            status = os.fstat(file.fileno())
            call = file_calls.write(
                self.id,
                path,
                None,
                status.st_size,
                user=user,
                mode=status.st_mode & 0o777 if mode is None else mode,
                owner=owner,
                parents=parents,
            )
            return await self._client.upload(call, _pieces(file))

    async def download_file(
        self, path: str, target: str | os.PathLike[str], *, user: str | None = None
    ) -> int:
        """Copy a file of the sandbox to ours, at constant memory; its size. What breaks off leaves
        nothing at ``target``."""
        written = 0
        with replacing(target) as file:
            async with self._client.stream(file_calls.read(self.id, path, user)) as pieces:
                async for piece in pieces:
                    written += await asyncio.to_thread(file.write, piece)
        return written

    async def upload_dir(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        owner: str | None = None,
        parents: bool = True,
        user: str | None = None,
    ) -> int:
        """Put the content of a directory of ours into one of the sandbox, which is made if it is
        missing; how many names that were. Raises OSError for what concerns ours."""
        call = file_calls.unpack(
            self.id, path, include=include, exclude=exclude, owner=owner, parents=parents, user=user
        )
        return await self._client.upload(call, _in_thread(local_tree.pack(source)))

    async def download_dir(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        skip_unreadable: bool = False,
        user: str | None = None,
    ) -> local_tree.Unpacked:
        """Put the content of a directory of the sandbox into one of ours. What leads out of it is
        left out (``local_tree``)."""
        call = file_calls.pack(
            self.id,
            path,
            include=include,
            exclude=exclude,
            skip_unreadable=skip_unreadable,
            user=user,
        )
        # By way of a file: tarfile wants to read, and must not make the event loop wait.
        with tempfile.TemporaryFile() as spool:
            async with self._client.stream(call) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(spool.write, piece)
            spool.seek(0)
            return await asyncio.to_thread(local_tree.unpack, spool, target)

    async def stat(self, path: str, *, follow: bool = False, user: str | None = None) -> FileEntry:
        """Raises FileNotFound. A symlink itself, unless ``follow``."""
        return await self._client.do(file_calls.stat(self.id, path, follow, user))

    async def list_dir(
        self,
        path: str,
        *,
        recursive: bool = False,
        depth: int | None = None,
        limit: int = file_calls.LIST_MAX,
        user: str | None = None,
    ) -> Listing:
        return await self._client.do(
            file_calls.list_dir(
                self.id, path, recursive=recursive, depth=depth, limit=limit, user=user
            )
        )

    async def find(self, path: str, **wanted: Unpack[FindOptions]) -> Listing:
        """Entries below a directory, by pattern, type, size or time: ``find("/src", pattern="*.py",
        type="file")``."""
        return await self._client.do(file_calls.find(self.id, path, wanted))

    async def mkdir(
        self,
        path: str,
        *,
        mode: int | None = None,
        parents: bool = True,
        user: str | None = None,
    ) -> FileEntry:
        """Make a directory; with ``parents`` one that is there is done."""
        return await self._client.do(file_calls.mkdir(self.id, path, mode, parents, user))

    async def move(
        self,
        source: str,
        destination: str,
        *,
        overwrite: bool = False,
        parents: bool = True,
        user: str | None = None,
    ) -> FileEntry:
        """Rename; ``destination`` is the new name, never a directory to put it in."""
        return await self._client.do(
            file_calls.move(
                self.id, source, destination, overwrite=overwrite, parents=parents, user=user
            )
        )

    async def chmod(
        self, path: str, mode: int, *, recursive: bool = False, user: str | None = None
    ) -> int:
        """How many names were changed."""
        return await self._client.do(file_calls.chmod(self.id, path, mode, recursive, user))

    async def chown(
        self, path: str, owner: str, *, recursive: bool = False, user: str | None = None
    ) -> int:
        """``name`` or ``uid``, with ``:group``. How many names were changed."""
        return await self._client.do(file_calls.chown(self.id, path, owner, recursive, user))

    async def remove(
        self,
        path: str,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: str | None = None,
    ) -> int:
        """How many names are gone."""
        call = file_calls.remove(self.id, path, recursive, missing_ok, user)
        return await self._client.do(call)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    # In a thread: the file may lie on shared storage that takes its time.
    while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield piece


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
