"""One control socket to a sandbox's PID 1: request ids, the way of each reply, and its death.

Speaks ``init/protocol.h``. Not for what a reply means: that is the business of the ``Request`` that
asked. Everything runs in the event loop's thread, in callbacks: no task and no future per message.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sandboxd.errors import CommandTooLong, SandboxdError, TooManyExecs
from sandboxd.init import protocol
from sandboxd.init.protocol import KillScope, MsgType

SEND_QUEUE_BYTES_MAX: Final = 1 << 20
"""Waiting for a PID 1 that does not read: it may be short of CPU, but not for ever."""

_ID_END: Final = 1 << 32


class Request(Protocol):
    """Whoever asked something; kept until it lets go of its id with ``Control.forget``."""

    def reply(self, kind: int, payload: bytes, fds: list[int]) -> None:
        """A reply with this request's id; the fds are the request's to close.

        Raises ProtocolError where the reply is not one that belongs.
        """

    def lost(self, error: SandboxdError) -> None:
        """The sandbox is gone; no reply comes any more."""


class Control:
    """The daemon's end of a control socket.

    ``on_closed`` is called once, when the other end closes or breaks the protocol, or when
    ``is_sound`` says that no result can be believed any more; the requests still waiting are told
    by ``fail``, by whoever knows why.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_closed: Callable[[str], None],
        is_sound: Callable[[], bool] = lambda: True,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._is_sound = is_sound
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        self._requests: dict[int, Request] = {}
        self._last_id = 0
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._queue_bytes = 0
        self._open = True
        self._error: SandboxdError | None = None
        self.alone = False
        """An exclusive command has the sandbox: what else is under way is stopped or killed."""
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def waiting(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def is_open(self) -> bool:
        return self._open

    # --- asking ------------------------------------------------------------------------------

    def register(self, request: Request) -> int:
        """A fresh id, under which replies reach ``request``. Raises the error of ``fail``."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        request_id = self._last_id
        while True:
            request_id = request_id % (_ID_END - 1) + 1
            if request_id not in self._requests:
                break
        self._last_id = request_id
        self._requests[request_id] = request
        return request_id

    def forget(self, request_id: int) -> None:
        """Replies with this id are dropped from now on."""
        self._requests.pop(request_id, None)

    def send(
        self,
        kind: MsgType,
        request_id: int,
        payload: bytes,
        *,
        flags: int = 0,
        fds: Sequence[int] = (),
    ) -> None:
        """Send one message; ``fds`` stay the caller's.

        Raises CommandTooLong above PAYLOAD_MAX and TooManyExecs when PID 1 has not read for so long
        that the queue is full. After the socket's end it does nothing: ``lost`` is on its way.
        """
        if len(payload) <= protocol.MSG_MAX - protocol.MSG.size:
            self._send(protocol.pack(kind, request_id, payload, flags), fds)
            return
        if kind is not MsgType.M_EXEC or len(payload) > protocol.PAYLOAD_MAX:
            raise CommandTooLong(
                f"arguments and environment have {len(payload)} bytes,"
                f" {protocol.PAYLOAD_MAX} is the most"
            )
        # The datagram's own payload is empty then; PID 1 takes the size from the memfd.
        memfd = os.memfd_create("exec", os.MFD_CLOEXEC)
        try:
            _pwrite_all(memfd, payload)
            flags |= protocol.ExecFlag.EXEC_PAYLOAD_FD
            self._send(protocol.pack(kind, request_id, b"", flags), (memfd, *fds))
        finally:
            os.close(memfd)

    def kill(self, request_id: int, signal: int, scope: KillScope) -> None:
        """Signal what the request with this id started."""
        self.send(MsgType.M_KILL, request_id, protocol.kill_payload(signal, scope))

    def _send(self, datagram: bytes, fds: Sequence[int]) -> None:
        if not self._open:
            return
        if not self._queue:
            try:
                protocol.send(self._sock, datagram, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._writable)
            except (BrokenPipeError, ConnectionResetError):
                return  # what PID 1 said before its end is still to be read, and then the end
            except OSError as error:
                self._closed(f"send: {error.strerror}")
                return
            else:
                return
        if self._queue_bytes + len(datagram) > SEND_QUEUE_BYTES_MAX:
            raise TooManyExecs("the sandbox does not take requests as fast as they come")
        # Copies, so that a caller may close its own whenever it likes.
        self._queue.append((datagram, [os.dup(fd) for fd in fds]))
        self._queue_bytes += len(datagram)

    def _writable(self) -> None:
        while self._queue:
            datagram, fds = self._queue[0]
            try:
                protocol.send(self._sock, datagram, fds)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._loop.remove_writer(self._sock.fileno())
                return
            except OSError as error:
                self._closed(f"send: {error.strerror}")
                return
            self._queue.popleft()
            self._queue_bytes -= len(datagram)
            protocol.close_fds(fds)
        self._loop.remove_writer(self._sock.fileno())

    # --- being answered ----------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            datagram, fds = protocol.receive(self._sock)
        except (BlockingIOError, InterruptedError, ConnectionResetError):
            # The last: PID 1 ended with messages unread. Told once, before what it still had said.
            return
        except OSError as error:
            self._closed(f"receive: {error.strerror}")
            return
        except protocol.ProtocolError as error:
            self._closed(str(error))
            return
        if not datagram:
            protocol.close_fds(fds)
            self._closed("exited")
            return
        try:
            message = protocol.unpack(datagram)
        except protocol.ProtocolError as error:
            protocol.close_fds(fds)
            self._closed(str(error))
            return
        request = self._requests.get(message.id)
        if request is None:
            protocol.close_fds(fds)
            return
        if message.type == MsgType.R_EXIT and not self._is_sound():
            protocol.close_fds(fds)
            self._closed("image-lost")
            return
        try:
            request.reply(message.type, message.payload, fds)
        except protocol.ProtocolError as error:
            self._closed(str(error))

    def _closed(self, reason: str) -> None:
        if self._open:
            self._release()
            self._on_closed(reason)

    def _release(self) -> None:
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._queue:
            protocol.close_fds(fds)
        self._queue.clear()
        self._queue_bytes = 0

    def fail(self, error: SandboxdError) -> None:
        """Close, and end every waiting request, and all that come, with ``error``. Idempotent."""
        if self._open:
            self._release()
        if self._error is None:
            self._error = error
        requests = list(self._requests.values())
        self._requests.clear()
        for request in requests:
            request.lost(error)


def _pwrite_all(fd: int, data: bytes) -> None:
    at = 0
    view = memoryview(data)
    while at < len(data):
        at += os.pwrite(fd, view[at:], at)
