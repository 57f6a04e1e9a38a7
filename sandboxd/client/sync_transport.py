"""A transport for httpx over plain keep-alive connections: HTTP/1.1, blocking, no TLS.

What a worker waits for between two commands is mostly its own HTTP client: httpx's default
transport takes 0.2 ms of CPU for a request that the kernel carries in 0.02. This one sends a
request in one piece and lets httptools, the parser that the daemon uses too, read the answer.

It keeps no more promises than the client needs: requests of known length or in chunks, answers of
any kind, errors of httpx's own tree. Safe to use from several threads: a connection belongs to one
request at a time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

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

RECEIVE_BYTES: Final = 1 << 16


class KeepAliveTransport(httpx.BaseTransport):
    """Connections to http:// addresses, kept for ``idle_s`` when a request is done."""

    def __init__(self, *, idle_s: float, socket_options: tuple[tuple[int, int, int], ...]) -> None:
        self._idle_s = idle_s
        self._options = socket_options
        self._lock = threading.Lock()
        self._idle: dict[Address, list[_Connection]] = {}
        self._closed = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError."""
        address = address_of(request)
        timeouts: Timeouts = request.extensions.get("timeout", {})
        connection = self._take(address) or self._connect(address, timeouts)
        try:
            connection.send(request, timeouts)
            answer = connection.receive_head(timeouts, to_head=request.method == "HEAD")
        except BaseException:
            connection.close()
            raise
        body = _Body(connection, timeouts, self._keep)
        if answer.complete:
            # Nothing is left to be read: what holds the response need not hold the connection.
            body.close()
        return httpx.Response(answer.status, headers=answer.headers, stream=body)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [one for kept in self._idle.values() for one in kept]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _take(self, address: Address) -> _Connection | None:
        """The connection that was used last, if it is still good."""
        while True:
            with self._lock:
                kept = self._idle.get(address)
                connection = kept.pop() if kept else None
            if connection is None:
                return None
            if time.monotonic() - connection.idle_since < self._idle_s and connection.is_quiet():
                return connection
            connection.close()

    def _keep(self, connection: _Connection) -> None:
        connection.idle_since = time.monotonic()
        with self._lock:
            if not self._closed:
                self._idle.setdefault(connection.address, []).append(connection)
                return
        connection.close()

    def _connect(self, address: Address, timeouts: Timeouts) -> _Connection:
        try:
            made = socket.create_connection(address, timeouts.get("connect"))
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in self._options:
                made.setsockopt(*option)
        except OSError as error:
            made.close()
            raise httpx.ConnectError(str(error)) from error
        return _Connection(made, address)


class _Connection:
    def __init__(self, made: socket.socket, address: Address) -> None:
        self.address = address
        self.idle_since = 0.0
        self._socket = made
        self._answer: HttpAnswer | None = None
        self._broken = False

    def is_quiet(self) -> bool:
        return is_quiet(self._socket.fileno())

    def send(self, request: httpx.Request, timeouts: Timeouts) -> None:
        self._answer = None
        self._socket.settimeout(timeouts.get("write"))
        try:
            self._send(request)
        except TimeoutError as error:
            raise httpx.WriteTimeout("the request could not be sent in time") from error
        except OSError as error:
            # It may have been answered before it was read to its end: a refusal is worth reading.
            self._broken = True
            if not select.select([self._socket], [], [], 0)[0]:
                raise httpx.WriteError(str(error)) from error

    def _send(self, request: httpx.Request) -> None:
        head, chunked = request_head(request)
        stream = request.stream
        if isinstance(stream, httpx.ByteStream):
            self._socket.sendall(head + b"".join(stream))
            return
        assert isinstance(stream, httpx.SyncByteStream)
        self._socket.sendall(head)
        for piece in stream:
            if not piece:
                continue
            self._socket.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            self._socket.sendall(b"0\r\n\r\n")

    def receive_head(self, timeouts: Timeouts, *, to_head: bool) -> HttpAnswer:
        answer = self._answer = HttpAnswer(to_head=to_head)
        received = 0
        while not answer.head_complete:
            received += self._receive(timeouts)
            if received > HEAD_BYTES_MAX and not answer.head_complete:
                raise httpx.RemoteProtocolError("an answer's headers have no end")
        return answer

    def pieces(self, timeouts: Timeouts) -> Iterator[bytes]:
        """The answer's body as it comes. Raises httpx.TransportError where it is cut off."""
        answer = self._answer
        assert answer is not None
        while True:
            yield from answer.take_pieces()
            if answer.complete and not answer.pieces:
                return
            if not answer.complete:
                self._receive(timeouts)

    def _receive(self, timeouts: Timeouts) -> int:
        answer = self._answer
        assert answer is not None
        self._socket.settimeout(timeouts.get("read"))
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError as error:
            raise httpx.ReadTimeout("no answer in time") from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        if not data:
            if not answer.ended_by_close():
                raise httpx.RemoteProtocolError("the connection was closed before the answer's end")
            answer.complete, answer.keep_alive = True, False
            return 0
        try:
            answer.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise httpx.RemoteProtocolError(f"this is no HTTP answer: {error}") from error
        return len(data)

    @property
    def reusable(self) -> bool:
        """Whether the next request may be sent on it."""
        answer = self._answer
        return bool(answer and answer.complete and answer.keep_alive and not self._broken)

    def take_rest(self) -> list[bytes]:
        """What has come of a complete answer and was not asked for yet."""
        return self._answer.take_pieces() if self._answer is not None else []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


class _Body(httpx.SyncByteStream):
    """An answer's body; the connection goes back when it has been read, else it is closed."""

    def __init__(
        self, connection: _Connection, timeouts: Timeouts, keep: Callable[[_Connection], None]
    ) -> None:
        self._connection: _Connection | None = connection
        self._timeouts = timeouts
        self._keep = keep
        self._rest: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        if self._connection is not None:
            yield from self._connection.pieces(self._timeouts)
        rest, self._rest = self._rest, []
        yield from rest

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._rest = connection.take_rest()
        if connection.reusable:
            self._keep(connection)
        else:
            connection.close()
