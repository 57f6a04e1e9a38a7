"""Sends calls and reads their answers, blocking. What is asked and what it means is elsewhere.

Safe to use from several threads. After a fork the child gets connections of its own: two processes
that share one would take each other's answers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

import httpx

from sandboxd.client import address
from sandboxd.client.calls import Call
from sandboxd.client.driver import DriverBase, answer_of
from sandboxd.client.failures import error_from_body
from sandboxd.client.local_files import replacing
from sandboxd.client.retries import Answer, transport_error
from sandboxd.client.sync_transport import KeepAliveTransport

T = TypeVar("T")


class Driver(DriverBase[httpx.BaseTransport]):
    """The connections to one daemon. A context manager; sandboxes live on when it is closed."""

    def close(self) -> None:
        """Close the connections. Idempotent."""
        transport = self._retire()
        if transport is not None:
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def do(self, call: Call[T]) -> T:
        """Send a call, again where that is safe, and read its answer. Raises SandboxdError."""
        tries = self._tries(call, time.monotonic())
        while True:
            try:
                answer = self._send(call)
            except httpx.TransportError as error:
                pause_s = tries.after_failure(error, time.monotonic())
            else:
                if answer.status < 400:
                    return call.read(answer.body)
                pause_s = tries.after_answer(answer, time.monotonic())
            time.sleep(pause_s)

    def upload(self, call: Call[T], chunks: Iterable[bytes]) -> T:
        """The same with a body that comes in pieces: sent once, as the pieces are gone then."""
        try:
            answer = self._send(call, chunks)
        except httpx.TransportError as error:
            raise transport_error(error, self.url)[0] from error
        if answer.status < 400:
            return call.read(answer.body)
        raise error_from_body(answer.body, answer.status)

    @contextlib.contextmanager
    def stream(self, call: Call[T]) -> Iterator[Iterator[bytes]]:
        """An answer's body in pieces as they come. What breaks it off is raised while iterating."""
        response = self._open_stream(call)
        try:
            yield self._pieces(response)
        finally:
            _stream_of(response).close()

    def _download(self, call: Call[T], target: str | os.PathLike[str]) -> int:
        """An answer's body as a file of ours; its bytes. What breaks off leaves nothing."""
        with self.stream(call) as pieces, replacing(target) as file:
            return sum(file.write(piece) for piece in pieces)

    def _open_stream(self, call: Call[T]) -> httpx.Response:
        tries = self._tries(call, time.monotonic())
        while True:
            try:
                response = self._begin(call, call.body)
                if response.status_code < 400:
                    return response
                try:
                    answer = answer_of(response, _body(response))
                finally:
                    _stream_of(response).close()
            except httpx.TransportError as error:
                pause_s = tries.after_failure(error, time.monotonic())
            else:
                pause_s = tries.after_answer(answer, time.monotonic())
            time.sleep(pause_s)

    def _pieces(self, response: httpx.Response) -> Iterator[bytes]:
        try:
            yield from _stream_of(response)
        except httpx.TransportError as error:
            raise transport_error(error, self.url)[0] from error

    def _send(self, call: Call[T], chunks: Iterable[bytes] | None = None) -> Answer:
        response = self._begin(call, call.body if chunks is None else chunks)
        try:
            return answer_of(response, _body(response))
        finally:
            _stream_of(response).close()

    def _begin(self, call: Call[T], content: bytes | Iterable[bytes] | None) -> httpx.Response:
        request = self._address.request(call.method, call.path, call.headers, call.read_s, content)
        return self._connections().handle_request(request)

    def _new_transport(self) -> httpx.BaseTransport:
        return _transport(self.url)


def _stream_of(response: httpx.Response) -> httpx.SyncByteStream:
    # The stream itself: nothing is compressed, and httpx's layers above it double its price.
    assert isinstance(response.stream, httpx.SyncByteStream)
    return response.stream


def _body(response: httpx.Response) -> bytes:
    return b"".join(_stream_of(response))


def _transport(url: str) -> httpx.BaseTransport:
    if url.startswith("http://"):
        return KeepAliveTransport(idle_s=address.KEEP_IDLE_S, socket_options=address.SOCKET_OPTIONS)
    return httpx.HTTPTransport(
        limits=httpx.Limits(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=address.KEEP_IDLE_S,
        ),
        trust_env=False,
        socket_options=list(address.SOCKET_OPTIONS),
    )
