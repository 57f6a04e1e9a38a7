"""Bytes of a sandbox as an HTTP answer, at constant memory; ranges and entity tags of files.

Not for JSON. A stream that fails on its way is broken off, so that it cannot be taken for whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final, Protocol, Self

from fastapi import Response
from starlette.types import Receive, Scope, Send

from sandboxd.api.disconnect import ClientWatch
from sandboxd.errors import SandboxdError
from sandboxd.runtime.files import FileRead

log = logging.getLogger(__name__)

OCTETS: Final = "application/octet-stream"
_RANGE: Final = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)
_LAST_DATE_S: Final = 253_402_300_799
"""The end of year 9999, of which an HTTP date is the last."""


class Source(Protocol):
    """What a stream comes from: a file operation, a comparison."""

    head: bytes

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def abandon(self) -> None: ...
    def rest(self) -> AsyncIterator[bytes]: ...


class StreamAnswer(Response):
    """A stream that is still going on; ``body`` what comes of it, all from its start. The stream is
    closed however the answer ends. With a ``content-length`` in ``headers`` it has just so much."""

    def __init__(
        self,
        stream: Source,
        body: AsyncIterator[bytes],
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str = OCTETS,
    ) -> None:
        super().__init__(None, status, {"content-length": "0", **(headers or {})}, media_type)
        self._length = (headers or {}).get("content-length")
        if self._length is None:
            del self.headers["content-length"]
        self._stream = stream
        self._pieces = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream as stream, ClientWatch(receive, stream.abandon):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            sent = 0
            try:
                async for data in self._pieces:
                    sent += len(data)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except SandboxdError as error:
                # The server closes the connection on an answer without an end.
                log.info("a stream broke off after %d bytes: %s", sent, error)
                return
            if self._length is not None and sent != int(self._length):
                log.info("a file of %s bytes ended after %d", self._length, sent)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def pieces(stream: Source) -> AsyncIterator[bytes]:
    """All of a stream from its head."""
    yield stream.head
    async for data in stream.rest():
        yield data


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Of a Range header: ``length`` bytes from ``offset`` (to the end if None), or the last."""

    offset: int
    length: int | None
    suffix: bool = False


def byte_range(header: str | None) -> ByteRange | None:
    """The one range that is asked for; None for none, several or what is none, which RFC 9110 lets
    a server answer with the whole."""
    found = _RANGE.fullmatch(header.strip()) if header else None
    if found is None:
        return None
    first, last = found.groups()
    if not first:
        return ByteRange(0, int(last), suffix=True) if last else None
    if last and int(last) < int(first):
        return None
    return ByteRange(int(first), int(last) - int(first) + 1 if last else None)


def span(wanted: ByteRange, size: int) -> tuple[int, int] | None:
    """``(offset, length)`` within a file of ``size`` bytes; None where there is nothing of it."""
    if wanted.suffix:
        length = min(wanted.length or 0, size)
        return (size - length, length) if length else None
    if wanted.offset >= size:
        return None
    left = size - wanted.offset
    return wanted.offset, left if wanted.length is None else min(wanted.length, left)


def file_headers(read: FileRead) -> dict[str, str]:
    """What is told of a file beside its bytes. The tag holds for one inode, size and time; a file
    of proc has none, as it changes without any of them."""
    info = read.info
    headers = {
        "accept-ranges": "bytes",
        "x-file-size": str(info.size_bytes),
        "x-file-mode": f"{info.mode:04o}",
        "x-file-uid": str(info.uid),
        "x-file-gid": str(info.gid),
        "x-file-mtime-ns": str(info.mtime_ns),
    }
    if info.size_bytes:
        headers["etag"] = f'"{read.inode:x}-{info.size_bytes:x}-{info.mtime_ns & (1 << 64) - 1:x}"'
    seconds = info.mtime_ns // 1_000_000_000
    if 0 <= seconds <= _LAST_DATE_S:
        headers["last-modified"] = formatdate(seconds, usegmt=True)
    return headers


def matches(header: str, etag: str | None) -> bool:
    """Of If-None-Match: a list of tags, weak or not, or ``*``."""
    tags = [one.strip().removeprefix("W/") for one in header.split(",")]
    return "*" in tags or etag in tags
