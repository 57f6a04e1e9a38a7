"""Sends calls and reads their answers in asyncio, through httpx over aiohttp's connections.

httpx's own asynchronous pool looks at every connection for every request; with hundreds of them a
worker does little else (160 requests/s at 128 connections, where this gives thousands). So httpx is
what requests and answers are, and ``httpx-aiohttp`` what carries them.

A request that is cancelled closes its connection: the node kills its command, or undoes its create.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from sandboxd.client import address
from sandboxd.client.calls import Call
from sandboxd.client.failures import ClientMisused, error_from_body
from sandboxd.client.retries import Answer, Tries, transport_error

T = TypeVar("T")


class AsyncDriver:
    """The connections to one daemon, for one event loop. A context manager; sandboxes live on when
    it is closed. Arguments as for ``sync_driver.Driver``."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        retry_s: float = address.RETRY_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._address = address.find(url, token)
        self._retry_s = retry_s
        self._make_transport = _transport if transport is None else lambda: transport
        self._transport: httpx.AsyncBaseTransport | None = None
        self._pid = os.getpid()
        self._closed = False

    @property
    def url(self) -> str:
        return self._address.url

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        self._closed = True
        transport, self._transport = self._transport, None
        if transport is not None and self._pid == os.getpid():
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
        tries = self._tries(call)
        while True:
            try:
                answer = await self._send(call)
            except httpx.TransportError as error:
                pause_s = tries.after_failure(_true_failure(error), _now())
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
            raise transport_error(_true_failure(error), self.url)[0] from error
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

    async def _open_stream(self, call: Call[T]) -> httpx.Response:
        tries = self._tries(call)
        while True:
            try:
                response = await self._begin(call, call.body)
                if response.status_code < 400:
                    return response
                try:
                    answer = _answer(response, await _body(response))
                finally:
                    await _stream_of(response).aclose()
            except httpx.TransportError as error:
                pause_s = tries.after_failure(_true_failure(error), _now())
            else:
                pause_s = tries.after_answer(answer, _now())
            await asyncio.sleep(pause_s)

    async def _pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in _stream_of(response):
                yield piece
        except httpx.TransportError as error:
            raise transport_error(_true_failure(error), self.url)[0] from error

    def _tries(self, call: Call[T]) -> Tries:
        return Tries(self.url, repeatable=call.repeatable, now=_now(), within_s=self._retry_s)

    async def _send(self, call: Call[T], chunks: AsyncIterable[bytes] | None = None) -> Answer:
        response = await self._begin(call, call.body if chunks is None else chunks)
        try:
            return _answer(response, await _body(response))
        finally:
            await _stream_of(response).aclose()

    async def _begin(
        self, call: Call[T], content: bytes | AsyncIterable[bytes] | None
    ) -> httpx.Response:
        request = self._address.request(call.method, call.path, call.headers, call.read_s, content)
        return await self._connections().handle_async_request(request)

    def _connections(self) -> httpx.AsyncBaseTransport:
        if self._closed:
            raise ClientMisused("the client is closed")
        if self._pid != os.getpid():
            # Forked: the parent's connections are not ours to use, nor to close in an orderly way.
            self._transport, self._pid = None, os.getpid()
        if self._transport is None:
            self._transport = self._make_transport()
        return self._transport


def _now() -> float:
    return asyncio.get_running_loop().time()


def _answer(response: httpx.Response, body: bytes) -> Answer:
    return Answer(response.status_code, body, response.headers.get("retry-after"))


def _stream_of(response: httpx.Response) -> httpx.AsyncByteStream:
    # The stream itself: nothing is compressed, and httpx's layers above it double its price.
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return response.stream


async def _body(response: httpx.Response) -> bytes:
    return b"".join([piece async for piece in _stream_of(response)])


def _true_failure(failure: httpx.TransportError) -> httpx.TransportError:
    """httpx-aiohttp 0.2 calls every broken connection a ConnectTimeout, also one that broke after
    the request was sent: that would be sent twice. aiohttp's own word is the cause."""
    cause = failure.__cause__
    if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return httpx.ConnectError(str(failure))
    if isinstance(cause, aiohttp.ClientConnectionError) and not isinstance(
        failure, httpx.ReadTimeout
    ):
        return httpx.ReadError(str(failure) or type(cause).__name__)
    return failure


def _transport() -> httpx.AsyncBaseTransport:
    return AiohttpTransport(
        # The context of a plain http address is never looked at; to make one takes 20 ms.
        verify=False,
        trust_env=False,
        client=_session,
    )


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=0,  # how many at once is for the worker to say
        keepalive_timeout=address.KEEP_IDLE_S,
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent"),
        trust_env=False,
        # A large frame must not wait for the next: pieces are passed on as they come.
        read_bufsize=1 << 18,
    )


def _socket(info: Any) -> socket.socket:
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    try:
        for option in address.SOCKET_OPTIONS:
            made.setsockopt(*option)
    except OSError:
        made.close()
        raise
    return made
