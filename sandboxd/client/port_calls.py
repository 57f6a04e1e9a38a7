"""What is said to a port of a sandbox, without input or output: addresses, and a tunnel's frames.

A tunnel is a WebSocket whose binary messages are bytes of a TCP connection, in either direction;
the text ``eof`` is the end of a direction. The library's own blocking client is not used: it holds
one lock while it sends and while it takes what comes, and so stands still for ever when both sides
have much to send.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import httpx
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from sandboxd.client.address import Address
from sandboxd.client.failures import ConnectionLost, NotSandboxd, error_from_body, error_of_code
from sandboxd.errors import SandboxdError

EOF: Final = "eof"
PORT_TIMEOUT_S: Final = 120.0
MESSAGE_BYTES: Final = 64 * 1024
"""Of one that is sent; what comes may be of any size."""
ERROR_HEADER: Final = "x-sandboxd-error"


def http_path(sandbox_id: str, port: int) -> str:
    return f"/v1/sandboxes/{sandbox_id}/ports/{port}/http"


def port_headers(address: Address) -> dict[str, str]:
    """Of a client that speaks to the program."""
    return {"Authorization": address.authorization}


def error_in(response: httpx.Response) -> bool:
    """Whether an answer is the node's and not the program's. Its body is to be read then."""
    return ERROR_HEADER in response.headers


class TunnelFrames:
    """The WebSocket of one tunnel; ``outgoing`` is to be sent after whatever was called."""

    def __init__(self, address: Address, sandbox_id: str, port: int) -> None:
        path = f"/v1/sandboxes/{sandbox_id}/ports/{port}/tunnel"
        uri = parse_uri(address.url.replace("http", "ws", 1) + path)
        self.secure = uri.secure
        self.host = uri.host
        self.port = uri.port
        self._protocol = ClientProtocol(uri, max_size=None)
        request = self._protocol.connect()
        for name, value in port_headers(address).items():
            request.headers[name] = value
        self._protocol.send_request(request)
        self.is_open = False
        """The node has taken it: bytes can go."""
        self.ended = False
        """The program sends no more."""

    def outgoing(self) -> bytes:
        return b"".join(self._protocol.data_to_send())

    def pack(self, data: bytes | memoryview) -> None:
        with _unless_closed():
            self._protocol.send_binary(bytes(data))

    def pack_eof(self) -> None:
        with _unless_closed():
            self._protocol.send_text(EOF.encode())

    def feed(self, data: bytes) -> list[bytes]:
        """What was received: the program's bytes in it. None is its end: raises ConnectionLost
        where that was not due.

        Raises the node's error where it refused or closed the tunnel.
        """
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        pieces = [
            piece for event in self._protocol.events_received() for piece in self._take(event)
        ]
        if pieces:
            return pieces
        if isinstance(self._protocol.handshake_exc, Exception) and not self.is_open:
            raise NotSandboxd(f"no WebSocket: {self._protocol.handshake_exc}")
        if not data and not self.ended:
            raise ConnectionLost("the connection of a tunnel broke")
        return pieces

    def _take(self, event: object) -> Iterator[bytes]:
        if isinstance(event, Response):
            if event.status_code != 101:
                raise error_from_body(bytes(event.body or b""), event.status_code)
            if self._protocol.handshake_exc is None:
                self.is_open = True
        elif isinstance(event, Frame):
            if event.opcode is Opcode.TEXT:
                self.ended = True
            elif event.opcode is Opcode.CLOSE:
                self._closed()
            elif event.opcode in (Opcode.BINARY, Opcode.CONT) and event.data:
                yield bytes(event.data)

    def _closed(self) -> None:
        close = self._protocol.close_rcvd
        if close is None or close.code != 1000:
            raise _ended_by(close.reason if close is not None else "")
        self.ended = True


@contextlib.contextmanager
def _unless_closed() -> Iterator[None]:
    try:
        yield
    except InvalidState as error:
        raise ConnectionLost("the tunnel has ended") from error


def _ended_by(reason: str) -> SandboxdError:
    if not reason:
        return ConnectionLost("the node closed the tunnel")
    return error_of_code(reason, f"the node closed the tunnel: {reason}")
