"""What of the head of a request reaches a program in a sandbox, and what of its answer comes back.

Kept back on the way in: what belongs to this connection (RFC 9110, 7.6.1), the node's token, and
what tells where the client or the node is. ``Host`` is ``localhost`` and the port, which is what a
development server expects; a client that has credentials for the program itself puts them into
``X-Sandboxd-Authorization``.

On the way out: what would hold for the daemon's origin as a whole, which many sandboxes share in a
browser, or that could be taken for a word of ours (``X-Sandboxd-Error``). Cookies are bound to the
port's own path, and redirects to the program's own host lead there too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

Head = list[tuple[bytes, bytes]]

ERROR_HEADER: Final = "x-sandboxd-error"
"""In answers of ours to a request for a port: the error's code. The program cannot send it."""
AUTHORIZATION: Final = b"x-sandboxd-authorization"

_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
_NOT_IN: Final = _HOP | {
    b"authorization",
    b"host",
    # The server has answered it by the time a body is read.
    b"expect",
    b"forwarded",
    b"via",
    b"x-real-ip",
    b"sec-websocket-accept",
    b"sec-websocket-extensions",
    b"sec-websocket-key",
    b"sec-websocket-protocol",
    b"sec-websocket-version",
}
_NOT_OUT: Final = _HOP | {
    ERROR_HEADER.encode(),
    b"alt-svc",
    b"clear-site-data",
    b"public-key-pins",
    b"service-worker-allowed",
    b"strict-transport-security",
}


def request_head(head: Iterable[tuple[bytes, bytes]], port: int, scheme: str) -> Head:
    """Names in lower case, as ASGI gives them. The framing of a body is as it came."""
    given = list(head)
    dropped = _NOT_IN | _named_by_connection(given)
    passed: Head = [(b"host", b"localhost:%d" % port), (b"x-forwarded-proto", scheme.encode())]
    for name, value in given:
        if name == AUTHORIZATION:
            passed.append((b"authorization", value))
        elif name not in dropped and not name.startswith((b"x-forwarded-", b"x-sandboxd-")):
            passed.append((name, value))
    if any(name == b"transfer-encoding" for name, _ in given):
        passed = [(name, value) for name, value in passed if name != b"content-length"]
        passed.append((b"transfer-encoding", b"chunked"))
    return passed


def response_head(
    head: Iterable[tuple[bytes, bytes]], status: int, port: int, prefix: bytes
) -> Head:
    """``prefix`` is the path of the port's root here, without a slash at its end."""
    given = [(name.lower(), value) for name, value in head]
    dropped = _NOT_OUT | _named_by_connection(given)
    if status in (204, 304) or any(name == b"transfer-encoding" for name, _ in given):
        dropped |= {b"content-length"}
    passed: Head = []
    for name, value in given:
        if name in dropped:
            continue
        if name == b"set-cookie":
            value = _bound_cookie(value, prefix)
        elif name in (b"location", b"content-location"):
            value = _moved_location(value, port, prefix)
        passed.append((name, value))
    return passed


def _named_by_connection(head: Head) -> frozenset[bytes]:
    """What the sender says belongs to its connection alone; never what frames the body."""
    named = {
        token.strip().lower()
        for name, value in head
        if name == b"connection"
        for token in value.split(b",")
    }
    return frozenset(named - {b"content-length", b"host"})


def _bound_cookie(cookie: bytes, prefix: bytes) -> bytes:
    parts = cookie.split(b";")
    kept = [
        part
        for part in parts[1:]
        if part.partition(b"=")[0].strip().lower() not in (b"path", b"domain")
    ]
    return b";".join([parts[0], *kept, b" Path=" + prefix + b"/"])


def _moved_location(location: bytes, port: int, prefix: bytes) -> bytes:
    """A path from the program's root leads to the same below ``prefix``; others are left."""
    try:
        url = urlsplit(location.decode("ascii"))
        ours = url.hostname in ("localhost", "127.0.0.1", "::1") and url.port == port
    except ValueError:
        return location
    if url.scheme in ("http", "https") and ours:
        path = url._replace(scheme="", netloc="").geturl()
        return prefix + (path if path.startswith("/") else "/" + path).encode()
    if not url.scheme and not url.netloc and location.startswith(b"/"):
        return prefix + location
    return location
