"""Ports of a sandbox, blocking: a tunnel, and a local port that leads to one in the sandbox."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import httpx

from sandboxd.client.address import CONNECT_S, SOCKET_OPTIONS, Address
from sandboxd.client.failures import ConnectionFailed, ConnectionLost, error_from_body
from sandboxd.client.port_calls import (
    MESSAGE_BYTES,
    PORT_TIMEOUT_S,
    TunnelFrames,
    error_in,
    http_path,
    port_headers,
)
from sandboxd.client.sync_driver import Driver
from sandboxd.errors import SandboxdError

READ_BYTES = 256 * 1024
ACCEPT_S = 0.2
"""How soon a forward notices that it was closed."""


def http_client(address: Address, sandbox_id: str, port: int, timeout_s: float) -> httpx.Client:
    """One whose paths are the program's, and that raises the node's errors."""

    def raise_ours(response: httpx.Response) -> None:
        if error_in(response):
            raise error_from_body(response.read(), response.status_code)

    return httpx.Client(
        base_url=address.url + http_path(sandbox_id, port),
        headers=port_headers(address),
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        trust_env=False,
        event_hooks={"response": [raise_ours]},
    )


class SandboxPorts(ABC):
    """What a sandbox does with ports."""

    _client: Driver

    @property
    @abstractmethod
    def id(self) -> str:
        """The sandbox's."""

    def http(self, port: int, *, timeout_s: float = PORT_TIMEOUT_S) -> httpx.Client:
        """A client of the program that listens on a port of the sandbox; paths are the program's.

        It raises the node's errors (``PortClosed`` …); what the program answers is never one. To be
        closed, or used as a context manager. Credentials for the program go into the header
        ``X-Sandboxd-Authorization``.
        """
        return http_client(self._client.address, self.id, port, timeout_s)

    def tunnel(self, port: int) -> Tunnel:
        """A TCP connection to a port of the sandbox."""
        return Tunnel(self._client.address, self.id, port)

    def forward(self, port: int, local_port: int = 0, *, host: str = "127.0.0.1") -> Forward:
        """A port of this machine (``port`` of what is returned) that leads to one of the sandbox,
        until it is closed."""
        return Forward(self._client.address, self.id, port, local_port, host)


class Tunnel:
    """A TCP connection to a program in a sandbox. One thread may send while another receives."""

    def __init__(self, address: Address, sandbox_id: str, port: int) -> None:
        self._frames = TunnelFrames(address, sandbox_id, port)
        self._state = threading.Lock()
        self._sending = threading.Lock()
        self._pieces: list[bytes] = []
        self._sock = _connect(self._frames, address.url)
        try:
            self._flush()
            while not self._frames.is_open:
                self._receive()
        except BaseException:
            self._sock.close()
            raise

    def send(self, data: bytes) -> None:
        """Returns when the node has taken it. Raises SandboxdError where the tunnel has ended."""
        view = memoryview(data)
        for at in range(0, len(view), MESSAGE_BYTES):
            with self._state:
                self._frames.pack(view[at : at + MESSAGE_BYTES])
            self._flush()

    def end(self) -> None:
        """Send no more; what the program sends can still be received."""
        with self._state:
            self._frames.pack_eof()
        self._flush()

    def receive(self) -> bytes:
        """Some bytes of the program; none once it sends no more."""
        while not self._pieces:
            if self._frames.ended:
                return b""
            self._receive()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except OSError as error:
            raise ConnectionLost(f"the connection of a tunnel broke: {error}") from error
        with self._state:
            self._pieces += self._frames.feed(data)

    def _flush(self) -> None:
        with self._sending:
            with self._state:
                data = self._frames.outgoing()
            try:
                self._sock.sendall(data)
            except OSError as error:
                raise ConnectionLost(f"the connection of a tunnel broke: {error}") from error

    def close(self) -> None:
        """At once, in both directions. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _connect(frames: TunnelFrames, url: str) -> socket.socket:
    try:
        sock = socket.create_connection((frames.host, frames.port), CONNECT_S)
        for level, option, value in SOCKET_OPTIONS:
            sock.setsockopt(level, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if frames.secure:
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=frames.host)
        sock.settimeout(None)
    except OSError as error:
        raise ConnectionFailed(f"no connection to {url}: {error}") from error
    return sock


class Forward:
    """A port of this machine that leads to one in a sandbox: each connection is a tunnel. Open to
    whoever may connect to ``host``. Three threads a connection, until it is closed."""

    def __init__(
        self, address: Address, sandbox_id: str, port: int, local_port: int, host: str
    ) -> None:
        self._address = address
        self._sandbox_id = sandbox_id
        self._to = port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, local_port), family=family)
        self._listener.settimeout(ACCEPT_S)
        self.port: int = self._listener.getsockname()[1]
        """Ours; the system's choice where 0 was asked for."""
        self.last_error: SandboxdError | None = None
        """Why the last connection that failed did so."""
        self._closed = threading.Event()
        self._connections: set[threading.Thread] = set()
        self._ends: set[socket.socket | Tunnel] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it and all its connections. Idempotent."""
        self._closed.set()
        self._thread.join()
        self._listener.close()
        with self._lock:
            ends, threads = list(self._ends), list(self._connections)
        for end in ends:
            _cut(end)
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            sock.settimeout(None)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            with self._lock:
                self._connections.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        ends: set[socket.socket | Tunnel] = {sock}
        try:
            with sock, Tunnel(self._address, self._sandbox_id, self._to) as tunnel:
                ends.add(tunnel)
                with self._lock:
                    self._ends |= ends
                if not self._closed.is_set():
                    self._carry(sock, tunnel)
        except SandboxdError as error:
            self.last_error = error
        except OSError:
            pass  # whoever connected has gone
        finally:
            with self._lock:
                self._ends -= ends
                self._connections.discard(threading.current_thread())

    @staticmethod
    def _carry(sock: socket.socket, tunnel: Tunnel) -> None:
        def outwards() -> None:
            try:
                while data := tunnel.receive():
                    sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            except (OSError, SandboxdError):
                _cut(sock)

        thread = threading.Thread(target=outwards, daemon=True)
        thread.start()
        try:
            while data := sock.recv(READ_BYTES):
                tunnel.send(data)
            tunnel.end()
            thread.join()
        finally:
            _cut(sock)
            tunnel.close()
            thread.join()


def _cut(end: socket.socket | Tunnel) -> None:
    if isinstance(end, Tunnel):
        end.close()
        return
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
