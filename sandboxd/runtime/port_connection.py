"""A connection to a TCP port on which a program in a sandbox listens.

The socket is made by the sandbox's PID 1, in the sandbox's own network namespace, and connected
from here to that namespace's loopback: nothing of the sandbox runs for it, no address of the node
has a part in it, and it works where the sandbox has no network. A socket is one namespace's for
ever, so it may be used in this process; what its buffers hold is charged to the sandbox, whose PID
1 made it.

The other end is the policy's: it may take no connection, say nothing, say too much, or reset.
Whatever it does is an error of the workload.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Final

from sandboxd.errors import (
    NodeError,
    PortBroken,
    PortClosed,
    PortTimeout,
    SandboxdError,
    TooManyPortConnections,
)
from sandboxd.init import protocol
from sandboxd.init.protocol import MsgType, ProtocolError
from sandboxd.runtime.control import Control
from sandboxd.runtime.failures import words

READ_BYTES: Final = 64 * 1024

_ADDRESSES: Final = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_NO_IPV6: Final = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENETUNREACH}
_FULL: Final = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS}


class PortConnection:
    """One connection, open. ``on_moved`` is called whenever bytes have gone through, either way.

    ``read`` and ``write`` raise PortBroken where the other end has reset it. No stream of asyncio:
    one whose writing fails throws away what there is to read, such as the answer to a request that
    the program did not want to hear to its end.
    """

    def __init__(self, sock: socket.socket, on_moved: Callable[[], None]) -> None:
        self._sock = sock
        self._on_moved = on_moved
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()

    async def read(self) -> bytes:
        """Some bytes; none at the end of what the program sends."""
        try:
            data = await self._loop.sock_recv(self._sock, READ_BYTES)
        except OSError as error:
            raise _hung_up(error) from error
        self._moved()
        return data

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more: memory is bounded whatever the program reads."""
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError as error:
            raise _hung_up(error) from error
        self._moved()

    def write_eof(self) -> None:
        """The program sees the end of what it is sent, and may go on sending itself."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise _hung_up(error) from error

    def _moved(self) -> None:
        self._moved_at = self._loop.time()
        self._on_moved()

    async def watch_silence(self, timeout_s: float) -> None:
        """Raises PortTimeout once nothing has gone through for so long."""
        while (left_s := self._moved_at + timeout_s - self._loop.time()) > 0:
            await asyncio.sleep(left_s)
        raise PortTimeout(f"nothing went through the connection for {timeout_s:g} s")

    def close(self) -> None:
        """At once; what was not taken yet is dropped. Nobody may be reading or writing any more."""
        self._sock.close()


class PortConnections:
    """The tasks that have, or are making, a connection into one sandbox."""

    def __init__(self) -> None:
        self._errors: dict[asyncio.Task[object], SandboxdError | None] = {}

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, task: asyncio.Task[object]) -> None:
        self._errors[task] = None

    def remove(self, task: asyncio.Task[object]) -> SandboxdError | None:
        """Why it was ended, if it was."""
        return self._errors.pop(task, None)

    def end(self, error: SandboxdError) -> None:
        """Cancel all of them, for ``error``."""
        for task, known in self._errors.items():
            if known is None:
                self._errors[task] = error
                task.cancel()


async def open_connection(
    control: Control, port: int, on_moved: Callable[[], None]
) -> PortConnection:
    """Connect to a port of the sandbox's loopback, by IPv4, else by IPv6.

    Raises PortClosed where nothing listens, and whatever the sandbox's end is.
    """
    for family, host in _ADDRESSES:
        sock = await _SocketRequest(control, family).made()
        if sock is None:
            continue
        try:
            if await _connect(sock, host, port):
                return PortConnection(sock, on_moved)
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise PortClosed(f"nothing in the sandbox listens on port {port}", port=port)


async def _connect(sock: socket.socket, host: str, port: int) -> bool:
    """Whether something listens there. Raises PortTimeout, PortBroken."""
    try:
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        # Where nothing listens the kernel may give a socket the very port that it connects to, and
        # then it is connected to itself.
        return bool(sock.getsockname()[:2] != sock.getpeername()[:2])
    except ConnectionRefusedError:
        return False
    except TimeoutError as error:
        raise PortTimeout(f"port {port} does not take connections", port=port) from error
    except OSError as error:
        if error.errno in _NO_IPV6:
            return False
        raise PortBroken(f"port {port}: {words(error.errno or errno.EIO)}", port=port) from error


def _hung_up(error: OSError) -> PortBroken:
    return PortBroken(f"the program hung up: {words(error.errno or errno.EPIPE)}")


class _SocketRequest:
    """M_SOCKET."""

    def __init__(self, control: Control, family: int) -> None:
        self._control = control
        self._family = family
        self._done: asyncio.Future[socket.socket | None] = (
            asyncio.get_running_loop().create_future()
        )

    async def made(self) -> socket.socket | None:
        """The socket, the caller's to close; None where there are none of this family."""
        number = self._control.register(self)
        try:
            self._control.send(MsgType.M_SOCKET, number, protocol.socket_payload(self._family))
            return await self._done
        except asyncio.CancelledError:
            # It may have come in the very turn of the loop in which its waiter was cancelled.
            if self._done.done() and not self._done.cancelled() and not self._done.exception():
                sock = self._done.result()
                if sock is not None:
                    sock.close()
            raise
        finally:
            self._control.forget(number)

    def reply(self, kind: int, payload: bytes, fds: list[int]) -> None:
        if kind == MsgType.R_FAILED:
            protocol.close_fds(fds)
            self._failed(protocol.unpack_failure(payload).err)
            return
        if kind != MsgType.R_DONE or len(fds) != 1 or self._done.done():
            protocol.close_fds(fds)
            raise ProtocolError(f"reply {kind} with {len(fds)} descriptors to a request for one")
        os.set_inheritable(fds[0], False)
        sock = socket.socket(fileno=fds[0])
        if sock.family != self._family or sock.type != socket.SOCK_STREAM:
            sock.close()
            raise ProtocolError("a descriptor that is not the socket asked for")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._done.set_result(sock)

    def _failed(self, err: int) -> None:
        if self._done.done():
            return
        if err in _NO_IPV6 and self._family == socket.AF_INET6:
            self._done.set_result(None)
        elif err in _FULL or err in (errno.ENOMEM, errno.ENOBUFS):
            self._done.set_exception(
                TooManyPortConnections(f"the sandbox has no room for a socket: {words(err)}")
            )
        else:
            self._done.set_exception(NodeError(f"no socket in the sandbox: {words(err)}"))

    def lost(self, error: SandboxdError) -> None:
        if not self._done.done():
            self._done.set_exception(error)
