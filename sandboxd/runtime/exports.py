"""Snapshots as files for other nodes: the launcher's tar of one goes into a SIF, in a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, Self

from sandboxd.images import export
from sandboxd.runtime.diffs import TAR_TIMEOUT_S
from sandboxd.runtime.snapshots import SnapshotRecord, acquire

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

_READ_BYTES: Final = 256 * 1024


class Export:
    """A finished SIF on its way out."""

    head = b""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size_bytes = os.fstat(fd).st_size
        self._gone = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def abandon(self) -> None:
        self._gone = True

    async def rest(self) -> AsyncIterator[bytes]:
        at = 0
        while at < self.size_bytes and not self._gone:
            data = await asyncio.to_thread(os.pread, self._fd, _READ_BYTES, at)
            at += len(data)
            yield data


async def delta_sif(runtime: Runtime, snapshot: SnapshotRecord) -> Export:
    """A SIF to be laid over the snapshot's image, which is named in it by its digest.

    Raises ExportFailed, DiffUnspeakable, TreeTooLarge, ImageUnavailable, NodeError.
    """
    async with runtime.exporting:
        share = await acquire(runtime, snapshot)
        try:
            image = await runtime.images.store.check(snapshot.image)
            tar, write_fd = os.pipe2(os.O_CLOEXEC)
            call = runtime.launcher.call(
                "diff",
                fds=(write_fd,),
                timeout_s=TAR_TIMEOUT_S,
                form="tar",
                since=None,
                snapshot=snapshot.id,
                most=runtime.config.max_file_bytes,
            )
            asked = asyncio.create_task(call)
            await asyncio.sleep(0)  # the call has its own copy of the descriptor then
            os.close(write_fd)
            store = runtime.images.store
            made = asyncio.create_task(asyncio.to_thread(export.delta_sif, store, image, tar))
            # The launcher's reason counts: without its tar the other cannot be but a failure.
            told, file = await asyncio.gather(asked, made, return_exceptions=True)
            if isinstance(told, BaseException):
                if not isinstance(file, BaseException):
                    os.close(file)
                raise told
            if isinstance(file, BaseException):
                raise file
            return Export(file)
        finally:
            runtime.images.release(share)
