"""HTTP/1.1 as the client needs it, without input or output: a request's head, an answer's parser.

Both transports (``sync_transport``, ``aio_transport``) send a request in one piece and let
httptools, the parser that the daemon uses too, read the answer.
"""

from __future__ import annotations

import select
from collections.abc import Mapping
from typing import Final

import httptools
import httpx

HEAD_BYTES_MAX: Final = 1 << 18
"""Of an answer's headers: what answers with more is no daemon of ours."""

_NO_BODY: Final = (204, 304)

Timeouts = Mapping[str, float | None]
Address = tuple[str, int]


def address_of(request: httpx.Request) -> Address:
    """Host and port. Raises httpx.UnsupportedProtocol for what is not plain http."""
    url = request.url
    if url.scheme != "http":
        raise httpx.UnsupportedProtocol(f"{url.scheme}:// is not spoken here", request=request)
    return url.host, url.port or 80


def is_quiet(connection: int) -> bool:
    """Whether nothing has come on an idle connection, not even its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)


def request_head(request: httpx.Request) -> tuple[bytes, bool]:
    """What goes before the body, and whether the body goes in chunks."""
    lines = [b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    lines += [b"%s: %s" % header for header in request.headers.raw]
    chunked = "chunked" in request.headers.get("transfer-encoding", "").lower()
    return b"\r\n".join((*lines, b"", b"")), chunked


class HttpAnswer:
    """What has come of an answer; httptools calls its ``on_`` methods."""

    def __init__(self, *, to_head: bool) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.head_complete = False
        self.complete = False
        self.keep_alive = False
        self._to_head = to_head
        self._sized = False
        self._beyond = False

    def on_message_begin(self) -> None:
        # A second answer to one request: nothing on this connection can be believed.
        self.keep_alive = False
        self._beyond = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        self._sized = self._sized or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._beyond:
            return
        self.status = self.parser.get_status_code()
        if self.status < 200:  # an interim answer: the real one follows
            self.headers.clear()
            self._sized = False
            return
        self.head_complete = True
        self.keep_alive = self.parser.should_keep_alive()
        if self._to_head or self.status in _NO_BODY:
            self.complete = True

    def on_body(self, data: bytes) -> None:
        if not self._beyond:
            self.pieces.append(data)

    def take_pieces(self) -> list[bytes]:
        pieces, self.pieces = self.pieces, []
        return pieces

    def on_message_complete(self) -> None:
        self.complete = self.complete or self.head_complete

    def ended_by_close(self) -> bool:
        """Whether the end of the connection is the end of this body (RFC 9112, 6.3)."""
        return self.head_complete and not self._sized
