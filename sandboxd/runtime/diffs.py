"""What changed in a sandbox or a snapshot, as the launcher's child tells it through a pipe.

The bytes are passed on or taken apart as lines; the trees themselves are never looked at here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from sandboxd.errors import FileChanged, NodeUnavailable
from sandboxd.images.mounts import Share
from sandboxd.launcher.client import Answer
from sandboxd.runtime.sandbox import Sandbox
from sandboxd.runtime.snapshots import SnapshotRecord, acquire

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

LIST_TIMEOUT_S: Final = 75.0
TAR_TIMEOUT_S: Final = 660.0
"""Both longer than the launcher takes itself, waiting for its turn included."""
STALL_S: Final = 60.0
"""Whoever takes nothing of a tar for so long has given it up."""
CHUNK_BYTES: Final = 256 * 1024

Origin = Sandbox | SnapshotRecord


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """One path; ``path`` and ``target`` are bytes, of which paths are made."""

    path: bytes
    change: str
    what: tuple[str, ...]
    type: str
    mode: int
    uid: int
    gid: int
    size_bytes: int
    target: bytes | None


class DiffStream:
    """A tar on its way out: ``head`` is its beginning, ``rest`` what follows. Whether it is whole
    is known at its end alone; ``rest`` raises where it is not."""

    def __init__(
        self, reader: _Pipe, asked: asyncio.Task[Answer], share: Share, runtime: Runtime
    ) -> None:
        self._reader = reader
        self.asked = asked
        self._share: Share | None = share
        self._runtime = runtime
        self.head = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def fill_head(self) -> None:
        self.head = await self._reader.read()
        if not self.head:
            await self._finish()

    async def rest(self) -> AsyncIterator[bytes]:
        """Raises FileChanged and what else the launcher says."""
        loop = asyncio.get_running_loop()
        while data := await self._reader.read():
            patience = loop.call_later(STALL_S, self.abandon)
            try:
                yield data
            finally:
                patience.cancel()
        await self._finish()

    async def _finish(self) -> None:
        if self._reader.abandoned:
            raise FileChanged("nobody took it")
        await self.asked

    def abandon(self) -> None:
        """The client is gone: end what writes it."""
        self._reader.abandon()

    def close(self) -> None:
        self._reader.close()
        if self.asked.done() and not self.asked.cancelled():
            self.asked.exception()
        self.asked.cancel()
        if self._share is not None:
            self._runtime.images.release(self._share)
            self._share = None


class _Pipe:
    """The read end of a pipe in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._waiter: asyncio.Future[None] | None = None
        self.abandoned = False

    async def read(self) -> bytes:
        """What is there; b"" at the end."""
        while not self.abandoned and self._fd >= 0:
            try:
                return os.read(self._fd, CHUNK_BYTES)
            except BlockingIOError:
                pass
            self._waiter = self._loop.create_future()
            self._loop.add_reader(self._fd, self._wake)
            try:
                await self._waiter
            finally:
                if self._fd >= 0:
                    self._loop.remove_reader(self._fd)
                self._waiter = None
        return b""

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abandon(self) -> None:
        self.abandoned = True
        self.close()

    def close(self) -> None:
        self.close_write()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._wake()

    def close_write(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1


async def entries(
    runtime: Runtime,
    origin: Origin,
    since: SnapshotRecord | None,
    *,
    limit: int,
    after: bytes | None,
) -> tuple[list[DiffEntry], bool]:
    """At most ``limit`` changes behind the path ``after``, and whether there are more.

    Raises TreeTooLarge, ImageUnavailable, NodeError, for a sandbox SandboxBusy and its like.
    """
    more: dict[str, Any] = {"limit": limit}
    if after is not None:
        more["after"] = base64.b64encode(after.lstrip(b"/")).decode()
    stream = await _ask(runtime, origin, since=since, form="list", timeout_s=LIST_TIMEOUT_S, **more)
    with stream:
        await stream.fill_head()
        found = bytearray(stream.head)
        if stream.head:
            async for data in stream.rest():
                found += data
        answer = await stream.asked
        lines = bytes(found).splitlines()
        return [_entry(json.loads(line)) for line in lines], bool(answer.ok.get("more"))


async def tar(runtime: Runtime, origin: Origin, since: SnapshotRecord | None) -> DiffStream:
    """All changes as an OCI layer. Raises as ``entries``, and DiffUnspeakable."""
    stream = await _ask(
        runtime,
        origin,
        since=since,
        form="tar",
        timeout_s=TAR_TIMEOUT_S,
        most=runtime.config.max_file_bytes,
    )
    try:
        await stream.fill_head()
    except BaseException:
        stream.close()
        raise
    return stream


async def _ask(
    runtime: Runtime,
    origin: Origin,
    *,
    since: SnapshotRecord | None,
    form: str,
    timeout_s: float,
    **more: Any,
) -> DiffStream:
    if isinstance(origin, SnapshotRecord):
        what = {"snapshot": origin.id}
        share = await acquire(runtime, origin)
    else:
        # One that has died still has its files.
        what = {"sandbox": origin.id}
        if origin.mount is None:
            raise NodeUnavailable(f"sandbox {origin.id} is still being made", retry_after_s=1)
        share = runtime.images.hold(origin.mount.keys, origin.spec.image)
    pipe = _Pipe()
    call = runtime.launcher.call(
        "diff",
        fds=(pipe.write_fd,),
        timeout_s=timeout_s,
        form=form,
        since=None if since is None else since.id,
        **what,
        **more,
    )
    asked = asyncio.get_running_loop().create_task(call)
    stream = DiffStream(pipe, asked, share, runtime)
    try:
        await asyncio.sleep(0)  # the call has its own copy of the descriptor then
    finally:
        pipe.close_write()
    return stream


def _entry(row: dict[str, Any]) -> DiffEntry:
    return DiffEntry(
        path=base64.b64decode(row["path"]),
        change=row["change"],
        what=tuple(row["what"]),
        type=row["type"],
        mode=row["mode"],
        uid=row["uid"],
        gid=row["gid"],
        size_bytes=row["size"],
        target=None if row["target"] is None else base64.b64decode(row["target"]),
    )
