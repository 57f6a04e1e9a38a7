"""The launcher's end of its socket to hostd."""

from __future__ import annotations

import itertools
import socket
from contextlib import suppress
from typing import Any

from sandboxd.init.protocol import close_fds
from sandboxd.launcher import protocol
from sandboxd.launcher.loop import Loop, Promise, Task

ANSWER_TIMEOUT_S = 10.0
IMAGE_TIMEOUT_S = 50.0
"""Of which a digest takes the most. hostd goes on beyond it, and the next who asks waits less."""


Answer = tuple[dict[str, Any], list[int]]


class HostClient:
    """Asks hostd, and ends the loop when hostd is gone."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._ids = itertools.count(1)
        self._pending: dict[int, Promise[Answer]] = {}
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)

    def tell_ready(self) -> None:
        protocol.send(self._sock, {"event": "ready"})

    def fuse_fd(self) -> Task[int]:
        """``/dev/fuse``, opened inside the node's user namespace; the caller's to close."""
        _, (fd,) = yield from self._ask("fuse-fd", 1)
        return fd

    def layer(self, size_bytes: int, inodes: int) -> Task[int]:
        """A writable layer that only the host can make, as ``host.layers`` has it; the caller's to
        close."""
        _, (fd,) = yield from self._ask("layer", 1, size_bytes=size_bytes, inodes=inodes)
        return fd

    def image(self, sif_fd: int, offset_bytes: int, digest: str) -> Task[int]:
        """A mount of an image that the kernel serves, as ``host.images`` has it; the caller's to
        close. Raises OSError: EPERM where the file is not to be trusted."""
        _, (fd,) = yield from self._ask(
            "image",
            1,
            (sif_fd,),
            timeout_s=IMAGE_TIMEOUT_S,
            offset_bytes=offset_bytes,
            digest=digest,
        )
        return fd

    def view_server(self, directory: str) -> Task[tuple[int, int]]:
        """A new view server for the mount point ``directory``: its socket and its pidfd, the
        caller's to close. The one before is ended."""
        _, (sock, pidfd) = yield from self._ask("view-server", 2, directory=directory)
        return sock, pidfd

    def netns_fd(self, pid: int, pidfd: int) -> Task[int]:
        """The network namespace of a PID 1; the caller's to close."""
        _, (fd,) = yield from self._ask("netns", 1, (pidfd,), pid=pid)
        return fd

    def network(self) -> Task[list[int]]:
        """Sockets to a router and a resolver that were started for it; the caller's to close.

        Raises OSError, EOPNOTSUPP with the reason where this node gives no network.
        """
        _, fds = yield from self._ask("network", 2)
        return fds

    def mount(self, source: str, *, writable: bool) -> Task[tuple[int, dict[str, Any]]]:
        """A mount of the host's files, as ``host.mounts`` has it, the caller's to close; and its
        ``directory`` and ``mapped``."""
        told, (fd,) = yield from self._ask("mount", 1, source=source, writable=writable)
        return fd, told

    def _ask(
        self,
        verb: str,
        count: int,
        fds: tuple[int, ...] = (),
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        **fields: object,
    ) -> Task[Answer]:
        number = next(self._ids)
        promise: Promise[Answer] = Promise(lambda answer: close_fds(answer[1]))
        self._pending[number] = promise
        protocol.send(self._sock, {"id": number, "verb": verb, **fields}, fds)
        answer: Answer = yield from self._loop.wait(promise, timeout_s, "hostd")
        if len(answer[1]) != count:
            close_fds(answer[1])
            raise OSError(71, f"{len(answer[1])} descriptors for {verb}", "hostd")
        return answer

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
        if "ping" in message:
            # hostd does not read, or has just died: others see to that.
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                protocol.send(self._sock, {"pong": True})
            return
        promise = self._pending.pop(message.get("id", 0), None)
        if promise is None or promise.settled:
            close_fds(fds)
        elif "errno" in message:
            what = str(message.get("what") or "opening /dev/fuse")
            promise.reject(OSError(message["errno"], what, "hostd"))
        else:
            promise.resolve((message, fds))
