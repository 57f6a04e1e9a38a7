"""A forked child of the launcher that does what may block: mounting, probing, letting go.

It speaks ``launcher/protocol.py``'s framing over a socket pair: ``{"id", "op", ...}`` in,
``{"id", "ok": ...}`` or ``{"id", "errno", "what"}`` out, one at a time and in order. It may be
killed at any moment and is then forked anew by the next request.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from sandboxd.guard import Silence
from sandboxd.init.protocol import close_fds
from sandboxd.launcher import protocol
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.linux import procfs
from sandboxd.linux.process import set_parent_death_signal

Handler = Callable[[dict[str, Any], list[int]], tuple[Any, tuple[int, ...]]]
"""Takes a request and its fds (closed afterwards); returns what to answer and the fds to pass,
which are closed once sent."""


Body = Callable[[socket.socket], None]
"""What the child does with its socket until the other end is closed."""


class Reply:
    """The answer of a worker: its value and fds, which are the receiver's to close."""

    __slots__ = ("fds", "value")

    def __init__(self, value: Any, fds: list[int]) -> None:
        self.value = value
        self.fds = fds

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Worker:
    """The launcher's end: starts the child, sends requests, settles their promises."""

    def __init__(
        self,
        loop: Loop,
        name: str,
        handlers: Callable[[], Mapping[str, Handler]] | None = None,
        *,
        body: Body | None = None,
    ) -> None:
        """One of ``handlers``, made in the child, and ``body``, for a child with a loop of its
        own."""
        self._loop = loop
        self._name = name
        if body is None:
            assert handlers is not None
            build = handlers
            body = lambda sock: serve(sock, build())  # noqa: E731
        self._body = body
        self._ids = itertools.count(1)
        self._pending: dict[int, Promise[Reply]] = {}
        self._queue: deque[tuple[dict[str, Any], tuple[int, ...]]] = deque()
        self._sock: socket.socket | None = None
        self.pid = 0

    def request(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> Promise[Reply]:
        """Send a request; the fds may be closed at once. OSError(errno, what) if it fails; EPIPE if
        the worker died under it."""
        promise: Promise[Reply] = Promise(Reply.close)
        number = next(self._ids)
        message = {"id": number, "op": op, **fields}
        try:
            self._send(message, fds)
        except (OSError, ValueError) as error:
            promise.reject(error)
        else:
            self._pending[number] = promise
        return promise

    def _send(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        sock = self._sock or self._start()
        if not self._queue:
            try:
                protocol.send(sock, message, fds)
            except BlockingIOError:
                self._loop.add_writer(sock.fileno(), self._writable)
            except (BrokenPipeError, ConnectionResetError):
                # It died, and the loop has not come to tell yet: this one goes to its successor.
                self._ended()
                protocol.send(self._sock or self._start(), message, fds)
                return
            else:
                return
        # Not dropped, and not waited for: a worker that frees a large root reads nothing for long.
        self._queue.append((message, tuple(os.dup(fd) for fd in fds)))

    def _writable(self) -> None:
        sock = self._sock
        assert sock is not None
        while self._queue:
            message, fds = self._queue[0]
            error: Exception | None = None
            try:
                protocol.send(sock, message, fds)
            except BlockingIOError:
                return
            except (OSError, ValueError) as refused:
                error = refused
            self._queue.popleft()
            close_fds(fds)
            promise = self._pending.pop(message["id"], None) if error else None
            if error is not None and promise is not None:
                promise.reject(error)
                if self._sock is not sock:  # by whoever waited for it
                    return
        self._loop.remove_writer(sock.fileno())

    @property
    def is_started(self) -> bool:
        return self._sock is not None

    def start(self) -> None:
        """Have the child now, where the first request should not pay for it."""
        if self._sock is None:
            self._start()

    def watch(self, limit_s: float) -> Task[None]:
        """For ever: kill a child that is stopped for so long. One that is only slow (a copy, a
        large root to be freed) is let be: those who wait for it have their own time-outs."""
        silence = Silence(limit_s)
        while True:
            yield from self._loop.sleep(silence.tick_s)
            if not self._is_stopped():
                silence.broken()
            elif silence.lasts() and silence.is_too_long:
                said = f"the {self._name} is stopped for {limit_s:g} s; killed"
                print(f"launcher: {said}", file=sys.stderr)
                silence.broken()
                self.kill()

    def _is_stopped(self) -> bool:
        with suppress(OSError):
            return self.pid > 0 and procfs.stat(self.pid).state == "T"
        return False

    def kill(self) -> None:
        """SIGKILL it; what it was asked fails with EPIPE."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(self._name, theirs, self._body, parent)
        theirs.close()
        ours.setblocking(False)
        self._sock, self.pid = ours, pid
        self._loop.add_reader(ours.fileno(), self._readable)
        pidfd = os.pidfd_open(pid)
        self._loop.add_reader(pidfd, lambda: self._exited(pid, pidfd))
        return ours

    def _exited(self, pid: int, pidfd: int) -> None:
        """Its socket ends earlier: waiting from then on would be for what it still frees."""
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        if self.pid == pid:
            self.pid = 0

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            message, fds = protocol.receive(self._sock)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message, fds = None, []
        if message is None:
            self._ended()
            return
        promise = self._pending.pop(message["id"], None)
        if promise is None or promise.settled:
            close_fds(fds)
        elif "errno" in message:
            promise.reject(
                OSError(message["errno"], os.strerror(message["errno"]), message["what"])
            )
        else:
            promise.resolve(Reply(message["ok"], fds))

    def _ended(self) -> None:
        assert self._sock is not None
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self.kill()  # in case it was its message that could not be read
        self._sock, self.pid = None, 0
        queue, self._queue = self._queue, deque()
        for _, fds in queue:
            close_fds(fds)
        pending, self._pending = self._pending, {}
        for promise in pending.values():
            promise.reject(BrokenPipeError(32, f"the {self._name} died"))


def _child(name: str, sock: socket.socket, body: Body, parent: int) -> None:
    """Serve until the launcher is gone. Never returns."""
    status = 1
    try:
        set_parent_death_signal(signal.SIGKILL, parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # No fd of the launcher may live on here: a forgotten copy of a FUSE fd turns the death of
        # its server from ENOTCONN into a hang, one of a control socket keeps a sandbox alive.
        keep = sock.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        body(sock)
        status = 0
    except BaseException:  # noqa: BLE001 - a forked child must not return into its parent's stack
        print(f"{name}: died", file=sys.stderr)
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(status)


def serve(sock: socket.socket, handlers: Mapping[str, Handler]) -> None:
    """Answer requests one by one until the other end is closed."""
    sock.setblocking(True)
    while serve_one(sock, handlers):
        pass


def serve_one(sock: socket.socket, handlers: Mapping[str, Handler]) -> bool:
    """Answer one request, waiting for it; False once the other end is closed."""
    try:
        message, fds = protocol.receive(sock)
    except ConnectionResetError:  # closed with an answer of ours unread
        return False
    if message is None:
        return False
    passed: tuple[int, ...] = ()
    try:
        value, passed = handlers[message["op"]](message, fds)
        protocol.send(sock, {"id": message["id"], "ok": value}, passed)
    except OSError as error:
        what = error.filename or error.strerror or str(error)
        protocol.send(sock, {"id": message["id"], "errno": error.errno or 5, "what": str(what)})
    finally:
        close_fds((*fds, *passed))
    return True
