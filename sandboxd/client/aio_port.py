"""Ports of a sandbox in asyncio: a tunnel, and a local port that leads to one in the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import httpx

from sandboxd.client.address import CONNECT_S, Address
from sandboxd.client.aio_driver import AsyncDriver, make_transport
from sandboxd.client.failures import ConnectionFailed, ConnectionLost, error_from_body
from sandboxd.client.port_calls import (
    MESSAGE_BYTES,
    PORT_TIMEOUT_S,
    TunnelFrames,
    error_in,
    http_path,
    port_headers,
)
from sandboxd.errors import SandboxdError

READ_BYTES = 256 * 1024


def http_client(
    address: Address, sandbox_id: str, port: int, timeout_s: float
) -> httpx.AsyncClient:
    """As ``sync_port.http_client``."""

    async def raise_ours(response: httpx.Response) -> None:
        if error_in(response):
            raise error_from_body(await response.aread(), response.status_code)

    return httpx.AsyncClient(
        base_url=address.url + http_path(sandbox_id, port),
        headers=port_headers(address),
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        trust_env=False,
        transport=make_transport(address.url),
        event_hooks={"response": [raise_ours]},
    )


class AsyncSandboxPorts(ABC):
    """As ``sync_port.SandboxPorts``."""

    _client: AsyncDriver

    @property
    @abstractmethod
    def id(self) -> str:
        """The sandbox's."""

    def http(self, port: int, *, timeout_s: float = PORT_TIMEOUT_S) -> httpx.AsyncClient:
        """A client of the program that listens on a port of the sandbox; paths are the program's.

        It raises the node's errors (``PortClosed`` …); what the program answers is never one. To be
        closed, or used as a context manager. Credentials for the program go into the header
        ``X-Sandboxd-Authorization``.
        """
        return http_client(self._client.address, self.id, port, timeout_s)

    async def tunnel(self, port: int) -> AsyncTunnel:
        """A TCP connection to a port of the sandbox."""
        return await AsyncTunnel.open(self._client.address, self.id, port)

    async def forward(
        self, port: int, local_port: int = 0, *, host: str = "127.0.0.1"
    ) -> AsyncForward:
        """A port of this machine (``port`` of what is returned) that leads to one of the sandbox,
        until it is closed."""
        forward = AsyncForward(self._client.address, self.id, port)
        await forward.start(local_port, host)
        return forward


class AsyncTunnel:
    """As ``sync_port.Tunnel``. One task may send while another receives."""

    def __init__(
        self, frames: TunnelFrames, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._frames = frames
        self._reader = reader
        self._writer = writer
        self._pieces: list[bytes] = []

    @classmethod
    async def open(cls, address: Address, sandbox_id: str, port: int) -> Self:
        """Raises SandboxdError where the node or the program takes no connection."""
        frames = TunnelFrames(address, sandbox_id, port)
        context = ssl.create_default_context() if frames.secure else None
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    frames.host, frames.port, ssl=context, limit=READ_BYTES
                )
        except (OSError, TimeoutError) as error:
            raise ConnectionFailed(f"no connection to {address.url}: {error}") from error
        tunnel = cls(frames, reader, writer)
        try:
            await tunnel._flush()
            while not frames.is_open:
                await tunnel._receive()
        except BaseException:
            tunnel.close()
            raise
        return tunnel

    async def send(self, data: bytes) -> None:
        """Returns when there is room for more. Raises SandboxdError where the tunnel has ended."""
        view = memoryview(data)
        for at in range(0, len(view), MESSAGE_BYTES):
            self._frames.pack(view[at : at + MESSAGE_BYTES])
            await self._flush()

    async def end(self) -> None:
        """Send no more; what the program sends can still be received."""
        self._frames.pack_eof()
        await self._flush()

    async def receive(self) -> bytes:
        """Some bytes of the program; none once it sends no more."""
        while not self._pieces:
            if self._frames.ended:
                return b""
            await self._receive()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    async def _receive(self) -> None:
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise ConnectionLost(f"the connection of a tunnel broke: {error}") from error
        self._pieces += self._frames.feed(data)

    async def _flush(self) -> None:
        try:
            self._writer.write(self._frames.outgoing())
            await self._writer.drain()
        except OSError as error:
            raise ConnectionLost(f"the connection of a tunnel broke: {error}") from error

    def close(self) -> None:
        """At once, in both directions. Idempotent."""
        self._writer.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncForward:
    """As ``sync_port.Forward``, in tasks."""

    def __init__(self, address: Address, sandbox_id: str, port: int) -> None:
        self._address = address
        self._sandbox_id = sandbox_id
        self._to = port
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.last_error: SandboxdError | None = None
        """Why the last connection that failed did so."""

    async def start(self, local_port: int, host: str) -> None:
        self._server = await asyncio.start_server(self._serve, host, local_port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End it and all its connections. Idempotent."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with await AsyncTunnel.open(self._address, self._sandbox_id, self._to) as tunnel:
                await _carry(reader, writer, tunnel)
        except SandboxdError as error:
            self.last_error = error
        except (OSError, asyncio.CancelledError):
            pass  # whoever connected has gone, or we are
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tunnel: AsyncTunnel
) -> None:
    async def inwards() -> None:
        while data := await reader.read(READ_BYTES):
            await tunnel.send(data)
        await tunnel.end()

    async def outwards() -> None:
        while data := await tunnel.receive():
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    ways = [asyncio.ensure_future(inwards()), asyncio.ensure_future(outwards())]
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    # What is on its way to whoever connected goes there before the connection is cut.
    writer.close()
    await writer.wait_closed()
