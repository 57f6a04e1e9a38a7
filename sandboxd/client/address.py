"""Where the daemon is and how to show that one may ask: arguments, else the environment.

``SANDBOXD_URL`` (default ``http://127.0.0.1:8642``), ``SANDBOXD_TOKEN``, ``SANDBOXD_TOKEN_FILE``
(default ``/var/lib/sandboxd/token``). Not the daemon's configuration file: a worker has none.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import AsyncIterable, Iterable
from pathlib import Path
from typing import Final

import httpx

from sandboxd.client.failures import ClientMisused

DEFAULT_URL: Final = "http://127.0.0.1:8642"
DEFAULT_TOKEN_FILE: Final = "/var/lib/sandboxd/token"
PARSED_MAX: Final = 2048
HEADERS_MAX: Final = 1024
CONNECT_S: Final = 5.0
WRITE_S: Final = 120.0
RETRY_S: Final = 30.0
"""How long after its first try a call may be tried again."""

KEEP_IDLE_S: Final = 15.0
"""A connection that was idle for longer is not used again: the daemon closes one after 75 s, and a
command that is sent into a closing connection is neither known to have run nor not to have."""

Headers = tuple[tuple[str, str], ...]

SOCKET_OPTIONS: Final = (
    # A node that lost its power says nothing: noticed after 30 s of silence and 3 probes.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class Address:
    """A daemon, and how requests to it are made.

    Without a client object of httpx: no cookies, redirects, proxies or .netrc of the worker's
    environment have a part in this. Addresses and headers that come again, which is nearly all, are
    parsed once: that is a third of what a request costs the worker.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.authorization = f"Bearer {token}"
        self._base = {
            "Host": httpx.URL(url).netloc.decode("ascii"),
            "Authorization": self.authorization,
            "Accept": "application/json",
            "User-Agent": "sandboxd-client",
        }
        self._parsed = functools.lru_cache(PARSED_MAX)(httpx.URL)
        self._headers = functools.lru_cache(HEADERS_MAX)(self._with)

    def _with(self, headers: Headers) -> httpx.Headers:
        return httpx.Headers(self._base | dict(headers))

    def request(
        self,
        method: str,
        path: str,
        headers: Headers,
        read_s: float | None,
        content: bytes | Iterable[bytes] | AsyncIterable[bytes] | None,
    ) -> httpx.Request:
        timeout = {"connect": CONNECT_S, "read": read_s, "write": WRITE_S, "pool": None}
        extensions = {"timeout": timeout}
        url = self._parsed(self.url + path)
        if content is not None and not isinstance(content, bytes):
            headers_now = self._headers(headers)
            return httpx.Request(
                method, url, headers=headers_now, content=content, extensions=extensions
            )
        # As a stream that is read at once: what httpx does with ``content`` is to build all headers
        # anew to add this one.
        body = content or b""
        if body or method in ("POST", "PUT"):
            headers = (*headers, ("Content-Length", str(len(body))))
        request = httpx.Request(
            method,
            url,
            headers=self._headers(headers),
            stream=httpx.ByteStream(body),
            extensions=extensions,
        )
        request.read()
        return request


def find(url: str | None, token: str | None) -> Address:
    """Raises ClientMisused where there is no usable address or token."""
    url = (url or os.environ.get("SANDBOXD_URL") or DEFAULT_URL).rstrip("/")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ClientMisused(f"{url!r} is no address: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ClientMisused(f"{url!r} is no address", hint="it begins with http:// or https://")
    token = token or os.environ.get("SANDBOXD_TOKEN") or _read_token()
    return Address(url, token)


def _read_token() -> str:
    path = Path(os.environ.get("SANDBOXD_TOKEN_FILE") or DEFAULT_TOKEN_FILE)
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ClientMisused(
            f"there is no token: {path}: {error}",
            hint="give token=, or set SANDBOXD_TOKEN or SANDBOXD_TOKEN_FILE",
        ) from None
