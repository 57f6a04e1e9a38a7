"""Sends calls and reads their answers in asyncio. What is asked and what it means is elsewhere.

A request that is cancelled closes its connection: the node kills its command, or undoes its create.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

import httpx

from sandboxd.client import address
from sandboxd.client.aio_transport import AsyncKeepAliveTransport
from sandboxd.client.calls import Call
from sandboxd.client.driver import DriverBase, answer_of
from sandboxd.client.failures import error_from_body
from sandboxd.client.local_files import replacing
from sandboxd.client.retries import Answer, transport_error

T = TypeVar("T")


class AsyncDriver(DriverBase[httpx.AsyncBaseTransport]):
    """The connections to one daemon, for one event loop. A context manager; sandboxes live on when
    it is closed."""

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        transport = self._retire()
        if transport is not None:
            await transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def do(self, call: Call[T]) -> T:
        """Send a call, again where that is safe, and read its answer. Raises SandboxdError."""
        tries = self._tries(call, _now())
        while True:
            try:
                answer = await self._send(call)
            except httpx.TransportError as error:
                pause_s = tries.after_failure(error, _now())
            else:
                if answer.status < 400:
                    return call.read(answer.body)
                pause_s = tries.after_answer(answer, _now())
            await asyncio.sleep(pause_s)

    async def upload(self, call: Call[T], chunks: AsyncIterable[bytes]) -> T:
        """The same with a body that comes in pieces: sent once, as the pieces are gone then."""
        try:
            answer = await self._send(call, chunks)
        except httpx.TransportError as error:
            raise transport_error(error, self.url)[0] from error
        if answer.status < 400:
            return call.read(answer.body)
        raise error_from_body(answer.body, answer.status)

    @asynccontextmanager
    async def stream(self, call: Call[T]) -> AsyncIterator[AsyncIterator[bytes]]:
        """An answer's body in pieces as they come. What breaks it off is raised while iterating."""
        response = await self._open_stream(call)
        try:
            yield self._pieces(response)
        finally:
            await _stream_of(response).aclose()

    async def _download(self, call: Call[T], target: str | os.PathLike[str]) -> int:
        """An answer's body as a file of ours; its bytes. What breaks off leaves nothing."""
        written = 0
        async with self.stream(call) as pieces:
            with replacing(target) as file:
                async for piece in pieces:
                    written += file.write(piece)
        return written

    async def _open_stream(self, call: Call[T]) -> httpx.Response:
        tries = self._tries(call, _now())
        while True:
            try:
                response = await self._begin(call, call.body)
                if response.status_code < 400:
                    return response
                try:
                    answer = answer_of(response, await _body(response))
                finally:
                    await _stream_of(response).aclose()
            except httpx.TransportError as error:
                pause_s = tries.after_failure(error, _now())
            else:
                pause_s = tries.after_answer(answer, _now())
            await asyncio.sleep(pause_s)

    async def _pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in _stream_of(response):
                yield piece
        except httpx.TransportError as error:
            raise transport_error(error, self.url)[0] from error

    async def _send(self, call: Call[T], chunks: AsyncIterable[bytes] | None = None) -> Answer:
        response = await self._begin(call, call.body if chunks is None else chunks)
        try:
            return answer_of(response, await _body(response))
        finally:
            await _stream_of(response).aclose()

    async def _begin(
        self, call: Call[T], content: bytes | AsyncIterable[bytes] | None
    ) -> httpx.Response:
        request = self._address.request(call.method, call.path, call.headers, call.read_s, content)
        return await self._connections().handle_async_request(request)

    def _new_transport(self) -> httpx.AsyncBaseTransport:
        return make_transport(self.url)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _stream_of(response: httpx.Response) -> httpx.AsyncByteStream:
    # The stream itself: nothing is compressed, and httpx's layers above it double its price.
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return response.stream


async def _body(response: httpx.Response) -> bytes:
    return b"".join([piece async for piece in _stream_of(response)])


def make_transport(url: str) -> httpx.AsyncBaseTransport:
    if url.startswith("http://"):
        return AsyncKeepAliveTransport(
            idle_s=address.KEEP_IDLE_S, socket_options=address.SOCKET_OPTIONS
        )
    return httpx.AsyncHTTPTransport(
        limits=httpx.Limits(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=address.KEEP_IDLE_S,
        ),
        trust_env=False,
        socket_options=list(address.SOCKET_OPTIONS),
    )
