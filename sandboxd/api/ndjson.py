"""A stream of frames as an HTTP answer: NDJSON, heartbeats, and a client that goes away.

An ASGI response of its own and not Starlette's: that one cancels the generator when the client has
gone, and here the difference between an end and a cut is what counts.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Protocol

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MEDIA_TYPE: Final = "application/x-ndjson"
_MEDIA_TYPE: Final = MEDIA_TYPE.encode()


class FrameReader(Protocol):
    """Where the frames come from."""

    async def next(self, timeout_s: float) -> bytes | None:
        """Whole lines; a heartbeat after ``timeout_s``; None at the end."""

    def close(self) -> None:
        """The client takes no more."""


def wants_frames(request: Request) -> bool:
    """Whether the client asked for a stream in its Accept header."""
    return any(
        one.split(b";")[0].strip().lower() == _MEDIA_TYPE
        for name, value in request.scope["headers"]
        if name == b"accept" and value != b"*/*"
        for one in value.split(b",")
    )


class FrameResponse(Response):
    """Sends lines until the reader's end. Memory is one batch: the server's ``send`` waits while
    its own buffer is full."""

    def __init__(self, reader: FrameReader, *, heartbeat_s: float) -> None:
        super().__init__(
            media_type=MEDIA_TYPE,
            # A proxy that gathers an answer would hold back what is to be told at once.
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._reader = reader
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        telling = asyncio.ensure_future(self._tell(send))
        try:
            await asyncio.wait((gone, telling), return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
        finally:
            self._reader.close()
            for task in (gone, telling):
                task.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await task

    async def _tell(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        while True:
            lines = await self._reader.next(self._heartbeat_s)
            if lines is None:
                break
            await send({"type": "http.response.body", "body": lines, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
