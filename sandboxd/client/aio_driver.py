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

from sandboxd.client import address, slurm
from sandboxd.client.aio_transport import AsyncKeepAliveTransport
from sandboxd.client.calls import Call
from sandboxd.client.failures import ClientMisused, error_from_body
from sandboxd.client.local_files import replacing
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
        self._own_transport = transport
        self._transport: httpx.AsyncBaseTransport | None = None
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def from_slurm(
        cls,
        node: str | None = None,
        *,
        job: str | int | None = None,
        directory: str | os.PathLike[str] | None = None,
        retry_s: float = address.RETRY_S,
    ) -> Self:
        """The daemon of a node of a Slurm job: by default of the node and the job that this process
        is in. ``client.slurm.nodes`` has all of a job. Raises ClientMisused where none serves."""
        found = slurm.node(node, job, directory)
        return cls(found.url, found.token, retry_s=retry_s)

    @property
    def address(self) -> address.Address:
        """Where the daemon is, for what goes over connections of its own."""
        return self._address

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

    def _tries(self, call: Call[T]) -> Tries:
        within_s = self._retry_s if call.retry_s is None else call.retry_s
        return Tries(self.url, repeatable=call.repeatable, now=_now(), within_s=within_s)

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
            self._transport = self._own_transport or make_transport(self._address.url)
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
