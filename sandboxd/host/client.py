"""The launcher's end of its socket to hostd."""

from __future__ import annotations

import errno
import itertools
import os
import socket

from sandboxd.launcher import protocol
from sandboxd.launcher.loop import Loop, Promise, Task

ANSWER_TIMEOUT_S = 10.0


class HostClient:
    """Asks hostd, and ends the loop when hostd is gone."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._ids = itertools.count(1)
        self._pending: dict[int, Promise[int]] = {}
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)

    def tell_ready(self) -> None:
        protocol.send(self._sock, {"event": "ready"})

    def fuse_fd(self) -> Task[int]:
        """``/dev/fuse``, opened inside the node's user namespace; the caller's to close."""
        return (yield from self._ask("fuse-fd"))

    def layer(self, size_bytes: int, inodes: int) -> Task[int]:
        """A writable layer that only the host can make, as ``host.layers`` has it; the caller's to
        close."""
        return (yield from self._ask("layer", size_bytes=size_bytes, inodes=inodes))

    def _ask(self, verb: str, **fields: int) -> Task[int]:
        number = next(self._ids)
        promise: Promise[int] = Promise(os.close)
        self._pending[number] = promise
        protocol.send(self._sock, {"id": number, "verb": verb, **fields})
        return (yield from self._loop.wait(promise, ANSWER_TIMEOUT_S, "hostd"))

    def _readable(self) -> None:
        try:
            message, fds = protocol.receive(self._sock)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message, fds = None, []
        if message is None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.stop()
            return
        promise = self._pending.pop(message.get("id", 0), None)
        if promise is None or promise.settled:
            for fd in fds:
                os.close(fd)
        elif len(fds) == 1:
            promise.resolve(fds[0])
        else:
            what = message.get("what", "opening /dev/fuse")
            number = message.get("errno", errno.EIO)
            promise.reject(OSError(number, os.strerror(number), f"hostd: {what}"))
