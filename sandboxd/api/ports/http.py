"""One HTTP request to a program in a sandbox, and its answer, streamed both ways.

A connection each: none is kept, so that nothing of one request can meet another. Memory is what is
under way: a head of ``HEAD_MAX``, a read of each side, and the buffers of the two connections.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Final

import h11
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sandboxd.api.exception_handlers import error_response
from sandboxd.api.ports.headers import ERROR_HEADER, request_head, response_head
from sandboxd.errors import PortBroken, PortTimeout, RequestError, SandboxdError
from sandboxd.runtime.port_connection import PortConnection
from sandboxd.runtime.ports import Ports
from sandboxd.runtime.sandbox import Sandbox

log = logging.getLogger(__name__)

HEAD_MAX: Final = 64 * 1024
"""Bytes of an answer's head; uvicorn holds a request's to the same."""
STATUS_MAX: Final = 599
EVENTS_AT_ONCE: Final = 128
"""Parsed before others have their turn: a chunk of one byte costs as much as one of a megabyte."""


class PortAnswer(Response):
    """Asks the program when it is sent, and is what that answers; an error of ours is told by the
    header ``X-Sandboxd-Error`` too, as the program may send any status and body."""

    def __init__(self, ports: Ports, sandbox: Sandbox, port: int, *, silence_s: float) -> None:
        super().__init__()
        self._ports = ports
        self._sandbox = sandbox
        self._port = port
        self._silence_s = silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope, self._port, self._silence_s, receive, send)
        try:
            async with self._ports.connection(self._sandbox, self._port) as connection:
                await exchange.run(connection)
        except SandboxdError as error:
            if exchange.begun:
                # The server closes the connection on an answer without an end.
                log.info("an answer of a port broke off: %s", error)
            else:
                refusal = error_response(error, {ERROR_HEADER: error.code})
                await refusal(scope, receive, send)


class _Exchange:
    def __init__(
        self, scope: Scope, port: int, silence_s: float, receive: Receive, send: Send
    ) -> None:
        self._scope = scope
        self._port = port
        self._silence_s = silence_s
        self._receive = receive
        self._send = send
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_MAX)
        self.begun = False
        """Whether the client has had the head of the answer."""
        self._loop = asyncio.get_running_loop()
        self._asked_at = self._loop.time()

    async def run(self, connection: PortConnection) -> None:
        """Returns at the end of the answer, or once the client has gone."""
        await connection.write(self._request())
        answering = asyncio.ensure_future(self._answer(connection))
        asking = asyncio.ensure_future(self._ask(connection))
        watching = asyncio.ensure_future(self._watch(connection))
        tasks = (answering, watching, asking)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Where it is ``asking`` that has ended, nobody is there for an answer any more.
            next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _request(self) -> bytes:
        scope = self._scope
        query: bytes = scope["query_string"]
        target = b"/" + target_of(scope) + (b"?" + query if query else b"")
        head = [
            *request_head(scope["headers"], self._port, scope["scheme"]),
            (b"connection", b"close"),
        ]
        try:
            sent = self._h11.send(h11.Request(method=scope["method"], target=target, headers=head))
        except h11.LocalProtocolError as error:
            raise RequestError(f"the request cannot be passed on: {error}") from error
        assert sent is not None
        return sent

    async def _ask(self, connection: PortConnection) -> None:
        """Pass the body on; then wait for the client's going."""
        sending = True
        while (message := await self._receive())["type"] != "http.disconnect":
            if sending:
                sending = await self._pass_on(connection, message)

    async def _pass_on(self, connection: PortConnection, message: Message) -> bool:
        """False once the program takes no more: it may have answered without reading it all."""
        try:
            if body := message.get("body", b""):
                await connection.write(self._h11.send(h11.Data(data=body)) or b"")
            if not message.get("more_body", False):
                await connection.write(self._h11.send(h11.EndOfMessage()) or b"")
        except (PortBroken, h11.LocalProtocolError):
            return False
        self._asked_at = self._loop.time()
        return True

    async def _watch(self, connection: PortConnection) -> None:
        # An answer's head that comes a byte at a time is silence too.
        while not self.begun:
            left_s = self._asked_at + self._silence_s - self._loop.time()
            if left_s <= 0:
                raise PortTimeout(f"port {self._port} did not answer for {self._silence_s:g} s")
            await asyncio.sleep(left_s)
        await connection.watch_silence(self._silence_s)

    async def _answer(self, connection: PortConnection) -> None:
        gathered = bytearray()
        for count in itertools.count(1):
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                raise PortBroken(f"port {self._port} answered with no HTTP: {error}") from error
            if isinstance(event, h11.Data):
                # One message for all chunks of a read: there may be thousands.
                gathered += event.data
            elif event is h11.NEED_DATA:
                if gathered:
                    await self._body(bytes(gathered), more=True)
                    gathered.clear()
                self._h11.receive_data(await connection.read())
            elif isinstance(event, h11.Response):
                await self._begin(event)
            elif isinstance(event, h11.EndOfMessage):
                await self._body(bytes(gathered), more=False)
                return
            elif not isinstance(event, h11.InformationalResponse):
                raise PortBroken(f"port {self._port} hung up without an answer")
            if count % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _begin(self, response: h11.Response) -> None:
        if response.status_code > STATUS_MAX:
            raise PortBroken(f"port {self._port} answered with status {response.status_code}")
        path = raw_path_of(self._scope)
        prefix = path[: len(path) - len(target_of(self._scope)) - 1]
        headers = response_head(
            response.headers.raw_items(), response.status_code, self._port, prefix
        )
        self.begun = True
        await self._send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": headers,
            }
        )

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def raw_path_of(scope: Scope) -> bytes:
    """The path as it was sent."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path.partition(b"?")[0]


def target_of(scope: Scope) -> bytes:
    """What follows ``/v1/sandboxes/ID/ports/PORT/http/`` of it."""
    return raw_path_of(scope).split(b"/", 7)[7]
