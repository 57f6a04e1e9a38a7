"""The transport of ``sync_transport`` for asyncio: what it promises, and why, is said there.

A rollout worker has hundreds of requests under way. httpx's own pool looks at every connection for
every request; here each request has a connection for itself, and none looks at another's.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final, cast

import httptools
import httpx

from sandboxd.client.http_message import (
    HEAD_BYTES_MAX,
    Address,
    HttpAnswer,
    Timeouts,
    address_of,
    is_quiet,
    request_head,
)

UNREAD_BYTES: Final = 1 << 18
"""Of an answer, held for who asked; above it the connection is not read."""


class AsyncKeepAliveTransport(httpx.AsyncBaseTransport):
    """Connections to http:// addresses, kept for ``idle_s`` when a request is done; for one event
    loop."""

    def __init__(self, *, idle_s: float, socket_options: tuple[tuple[int, int, int], ...]) -> None:
        self._idle_s = idle_s
        self._options = socket_options
        self._idle: dict[Address, list[_Connection]] = {}
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError."""
        address = address_of(request)
        timeouts: Timeouts = request.extensions.get("timeout", {})
        connection = self._take(address) or await self._connect(address, timeouts)
        try:
            answer = connection.begin(to_head=request.method == "HEAD")
            try:
                await connection.send(request, timeouts)
                await connection.wait_for_head(timeouts)
            finally:
                connection.close_spare()
        except BaseException:
            connection.close()
            raise
        body = _Body(connection, timeouts, self._keep)
        if answer.complete:
            body.release()
        return httpx.Response(answer.status, headers=answer.headers, stream=body)

    async def aclose(self) -> None:
        self._closed = True
        idle = [one for kept in self._idle.values() for one in kept]
        self._idle.clear()
        for connection in idle:
            connection.close()

    def _take(self, address: Address) -> _Connection | None:
        """The connection that was used last, if it is still good."""
        kept = self._idle.get(address)
        now = asyncio.get_running_loop().time()
        while kept:
            connection = kept.pop()
            fresh = now - connection.idle_since < self._idle_s
            if fresh and connection.reusable and connection.is_quiet():
                return connection
            connection.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        if self._closed:
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(connection.address, []).append(connection)

    async def _connect(self, address: Address, timeouts: Timeouts) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeouts.get("connect")):
                transport, connection = await loop.create_connection(
                    lambda: _Connection(address), *address
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        made: socket.socket = transport.get_extra_info("socket")
        try:
            for option in ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), *self._options):
                made.setsockopt(*option)
        except OSError as error:
            connection.close()
            raise httpx.ConnectError(str(error)) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection and the answer that is coming on it. Everything waits for one event: that
    something has come, or that there is room to send, or the end."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: HttpAnswer | None = None
        self._unread = 0
        self._received = 0
        self._failure: httpx.TransportError | None = None
        self._lost = False
        self._cut_short = False
        self._spare = -1
        """A second descriptor of the socket, while a body is sent in pieces: where a piece cannot
        be sent, the event loop throws away what was received, and that may be the refusal."""
        self._writable = True
        self._reading = True
        self._waiter: asyncio.Future[None] | None = None

    # --- what the event loop says ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or answer.complete:
            # Nobody asked for this: what comes next would be taken for another answer.
            self.close()
            return
        self._received += len(data)
        try:
            answer.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(f"this is no HTTP answer: {error}"))
        else:
            if not answer.head_complete and self._received > HEAD_BYTES_MAX:
                self._fail(httpx.RemoteProtocolError("an answer's headers have no end"))
        self._unread += len(data)
        if self._unread > UNREAD_BYTES and self._reading and self._transport and not self._lost:
            self._reading = False
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        answer = self._answer
        if answer is not None and not answer.complete:
            if answer.ended_by_close():
                answer.complete, answer.keep_alive = True, False
            else:
                words = "the connection was closed before the answer's end"
                self._fail(httpx.RemoteProtocolError(words))
        self._lost = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and self._failure is None:
            self._failure = httpx.ReadError(str(error))
        self.eof_received()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._wake()

    def _fail(self, failure: httpx.TransportError) -> None:
        self._failure = self._failure or failure
        self.close()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- what a request does -----------------------------------------------------------------

    def begin(self, *, to_head: bool) -> HttpAnswer:
        self._answer = HttpAnswer(to_head=to_head)
        self._unread = self._received = 0
        return self._answer

    async def send(self, request: httpx.Request, timeouts: Timeouts) -> None:
        assert self._transport is not None
        head, chunked = request_head(request)
        stream = request.stream
        if isinstance(stream, httpx.ByteStream):
            self._transport.write(head + b"".join(stream))
            return
        assert isinstance(stream, httpx.AsyncByteStream)
        self._spare = os.dup(self._transport.get_extra_info("socket").fileno())
        self._transport.write(head)
        async for piece in stream:
            if self._answered:
                self._cut_short = True  # refused before it was read to its end
                return
            if piece:
                self._transport.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            while not self._writable and not self._answered:
                await self._wait(timeouts.get("write"), httpx.WriteTimeout)
        if chunked:
            self._transport.write(b"0\r\n\r\n")

    @property
    def _answered(self) -> bool:
        return self._lost or bool(self._answer and self._answer.head_complete)

    async def wait_for_head(self, timeouts: Timeouts) -> None:
        answer = self._answer
        assert answer is not None
        while not answer.head_complete:
            if self._failure is not None:
                self._salvage(answer)
                if answer.head_complete:
                    return
                raise self._failure
            await self._wait(timeouts.get("read"), httpx.ReadTimeout)

    def _salvage(self, answer: HttpAnswer) -> None:
        """Take what had come when the connection broke."""
        with suppress(OSError):
            while self._spare >= 0 and not answer.complete:
                data = os.read(self._spare, UNREAD_BYTES)
                if not data:
                    break
                self.data_received(data)

    def close_spare(self) -> None:
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    async def pieces(self, timeouts: Timeouts) -> AsyncIterator[bytes]:
        """The answer's body as it comes. Raises httpx.TransportError where it is cut off."""
        answer = self._answer
        assert answer is not None
        while True:
            for piece in answer.take_pieces():
                yield piece
            self._unread = 0
            if not self._reading and not self._lost and self._transport is not None:
                self._reading = True
                self._transport.resume_reading()
            if answer.pieces:
                continue
            if answer.complete:
                return
            if self._failure is not None:
                raise self._failure
            await self._wait(timeouts.get("read"), httpx.ReadTimeout)

    async def _wait(self, within_s: float | None, late: type[httpx.TimeoutException]) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None
        if within_s is not None:
            timer = loop.call_later(within_s, self._too_late, waiter, late)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()

    @staticmethod
    def _too_late(waiter: asyncio.Future[None], late: type[httpx.TimeoutException]) -> None:
        if not waiter.done():
            waiter.set_exception(late("the daemon did not answer in time"))

    def take_rest(self) -> list[bytes]:
        """What has come of a complete answer and was not asked for yet."""
        return self._answer.take_pieces() if self._answer is not None else []

    @property
    def reusable(self) -> bool:
        """Whether the next request may be sent on it."""
        answer = self._answer
        whole = answer is not None and answer.complete and not self._cut_short
        return bool(answer and whole and answer.keep_alive and not self._lost)

    def is_quiet(self) -> bool:
        # The event loop may not have come to what has come already.
        assert self._transport is not None
        return is_quiet(self._transport.get_extra_info("socket").fileno())

    def close(self) -> None:
        self._lost = True
        if self._transport is not None:
            self._transport.abort()


class _Body(httpx.AsyncByteStream):
    """An answer's body; the connection goes back when it has been read, else it is closed."""

    def __init__(
        self, connection: _Connection, timeouts: Timeouts, keep: Callable[[_Connection], None]
    ) -> None:
        self._connection: _Connection | None = connection
        self._timeouts = timeouts
        self._keep = keep
        self._rest: list[bytes] = []

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._connection is not None:
            async for piece in self._connection.pieces(self._timeouts):
                yield piece
        rest, self._rest = self._rest, []
        for piece in rest:
            yield piece

    def release(self) -> None:
        """Let go of the connection; what has come of the body can still be read."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._rest = connection.take_rest()
        if connection.reusable:
            self._keep(connection)
        else:
            connection.close()

    async def aclose(self) -> None:
        self.release()
