"""A WebSocket to a program in a sandbox, message by message; and a raw TCP tunnel in one.

Messages are whole here, so each is bounded (``port_message_bytes``); nothing is read of one side
that the other has not taken, so memory does not grow with what is slow.

The tunnel's own language: a binary message is bytes of the connection, in either direction, cut
anywhere. The text message ``eof`` says that its sender sends no more (TCP's half-close), and the
other direction goes on; once both have said it, the daemon closes with 1000. Any other end closes
the TCP connection at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from sandboxd.api.exception_handlers import error_response
from sandboxd.api.ports.headers import ERROR_HEADER, request_head
from sandboxd.api.ports.http import target_of
from sandboxd.errors import NodeError, PortBroken, PortTimeout, RequestError, SandboxdError
from sandboxd.runtime.port_connection import PortConnection

EOF: Final = "eof"

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
INTERNAL_ERROR: Final = 1011
_REASON_MAX: Final = 123
"""Bytes of a close frame's reason, RFC 6455, 5.5."""


async def refuse(client: WebSocket, error: SandboxdError) -> None:
    """Answer the handshake with an error."""
    await client.send_denial_response(error_response(error, {ERROR_HEADER: error.code}))


async def end(client: WebSocket, error: SandboxdError) -> None:
    """Close what was accepted; the reason is the error's code."""
    code = INTERNAL_ERROR if isinstance(error, NodeError) else GOING_AWAY
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await client.close(code, error.code)


async def tunnel(client: WebSocket, connection: PortConnection, silence_s: float) -> None:
    """Until both directions have ended, or the client has gone. Raises SandboxdError."""

    async def inwards() -> None:
        while (data := await _received(client)) != EOF:
            if not isinstance(data, bytes):
                raise RequestError("a tunnel takes binary messages, and the text 'eof'")
            await connection.write(data)
        connection.write_eof()

    async def outwards() -> None:
        while data := await connection.read():
            await client.send_bytes(data)
        await client.send_text(EOF)

    await _both(inwards(), outwards(), connection.watch_silence(silence_s))
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await client.close(NORMAL)


class WebSocketProxy:
    """The WebSocket of the program, as its client."""

    def __init__(
        self, client: WebSocket, connection: PortConnection, port: int, message_max: int
    ) -> None:
        self._client = client
        self._connection = connection
        self._port = port
        query: bytes = client.scope["query_string"]
        self._protocol = ClientProtocol(
            WebSocketURI(
                secure=False,
                host="localhost",
                port=port,
                path="/" + target_of(client.scope).decode("ascii", "replace"),
                query=query.decode("ascii", "replace"),
            ),
            subprotocols=[Subprotocol(one) for one in client.scope["subprotocols"]] or None,
            max_size=message_max,
        )
        self._parts: list[bytes] = []
        self._is_text = False

    async def shake_hands(self, timeout_s: float) -> None:
        """Ask the program, and accept the client as that does. Raises PortBroken, PortTimeout."""
        request = self._protocol.connect()
        for name, value in request_head(self._client.scope["headers"], self._port, "http"):
            if name != b"host":
                request.headers[name.decode("latin-1")] = value.decode("latin-1")
        self._protocol.send_request(request)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._response()
        except TimeoutError:
            raise PortTimeout(f"port {self._port} did not answer for {timeout_s:g} s") from None
        if response.status_code != 101:
            raise PortBroken(
                f"port {self._port} refused the WebSocket with status {response.status_code}",
                status=response.status_code,
            )
        await self._client.accept(self._protocol.subprotocol)

    async def _response(self) -> Response:
        await self._flush()
        while True:
            events = self._protocol.events_received()
            if events:
                self._early = events[1:]
                response = events[0]
                assert isinstance(response, Response)
                if response.status_code == 101 and self._protocol.handshake_exc is not None:
                    raise self._no_handshake()
                return response
            if self._protocol.handshake_exc is not None:
                raise self._no_handshake()
            await self._read()

    def _no_handshake(self) -> PortBroken:
        error = self._protocol.handshake_exc
        words = str(error) if isinstance(error, InvalidHandshake) else type(error).__name__
        return PortBroken(f"port {self._port} answered with no WebSocket: {words}")

    async def _read(self) -> None:
        data = await self._connection.read()
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        await self._flush()

    async def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                await self._connection.write(data)

    async def run(self, silence_s: float) -> None:
        """Until either side has closed; the other is closed with the same code."""
        await _both(
            self._inwards(),
            self._outwards(),
            self._connection.watch_silence(silence_s),
            first=True,
        )

    async def _inwards(self) -> None:
        while True:
            message = await self._client.receive()
            try:
                if message["type"] == "websocket.disconnect":
                    self._protocol.send_close(_sendable(message.get("code", GOING_AWAY)))
                    await self._flush()
                    return
                data = _content(message)
                if isinstance(data, bytes):
                    self._protocol.send_binary(data)
                else:
                    self._protocol.send_text(data.encode())
            except InvalidState:
                return
            await self._flush()

    async def _outwards(self) -> None:
        events = self._early
        while True:
            for event in events:
                if isinstance(event, Frame) and await self._frame(event):
                    return
            if self._protocol.parser_exc is not None:
                raise PortBroken(f"port {self._port} broke the WebSocket's rules")
            if self._protocol.eof_sent or self._protocol.close_expected():
                raise PortBroken(f"port {self._port} hung up")
            await self._read()
            events = self._protocol.events_received()

    async def _frame(self, frame: Frame) -> bool:
        """Pass one on; True for a close."""
        if frame.opcode is Opcode.CLOSE:
            close = self._protocol.close_rcvd
            code = close.code if close is not None else NORMAL
            reason = close.reason if close is not None else ""
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await self._client.close(_sendable(code), reason)
            return True
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._is_text = frame.opcode is Opcode.TEXT
        elif frame.opcode is not Opcode.CONT:
            return False
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return False
        data, self._parts = b"".join(self._parts), []
        if not self._is_text:
            await self._client.send_bytes(data)
            return False
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise PortBroken(f"port {self._port} sent a text that is no UTF-8") from None
        await self._client.send_text(text)
        return False


async def _received(client: WebSocket) -> bytes | str:
    message = await client.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", GOING_AWAY))
    return _content(message)


def _content(message: Message) -> bytes | str:
    data: bytes | None = message.get("bytes")
    return data if data is not None else str(message.get("text", ""))


def _sendable(code: int) -> int:
    """A code that may stand in a close frame: 1005, 1006 and 1015 say that there was none."""
    if 1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999:
        return code
    return GOING_AWAY


async def _both(
    inwards: Coroutine[Any, Any, None],
    outwards: Coroutine[Any, Any, None],
    watch: Coroutine[Any, Any, None],
    *,
    first: bool = False,
) -> None:
    """Run two directions until both have ended, or the first of them has, or the watch raises."""
    ways = {asyncio.ensure_future(inwards), asyncio.ensure_future(outwards)}
    watching = asyncio.ensure_future(watch)
    pending = set(ways)
    try:
        while pending:
            done, _ = await asyncio.wait({*pending, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            pending -= done
            if first and done:
                return
    finally:
        for task in (*ways, watching):
            task.cancel()
        await asyncio.gather(*ways, watching, return_exceptions=True)
