"""The launcher's socket: a connection for each daemon, a task for each request (protocol.py).

A daemon that reads more slowly than it is answered (a thousand creates at once) is not cut off:
what its socket does not take waits here, up to a bound.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from sandboxd.errors import NodeError, NodeUnavailable, SandboxDead, SandboxdError
from sandboxd.init.protocol import close_fds
from sandboxd.launcher import protocol
from sandboxd.launcher.diffs import Diffs
from sandboxd.launcher.images import Images, MountedImage
from sandboxd.launcher.loop import Loop, Promise
from sandboxd.launcher.processes import Process, Processes
from sandboxd.launcher.sandboxes import Sandbox, Sandboxes
from sandboxd.launcher.slots import Slots
from sandboxd.launcher.snapshots import Snapshots
from sandboxd.launcher.transfers import Transfers
from sandboxd.launcher.verbs import Answer, Verbs
from sandboxd.launcher.worker import Worker

UNSENT_MAX: Final = 65_536
"""Messages that wait for one daemon; each may hold descriptors. Beyond, it is taken for hung: it
can come back and ask with ``list``."""


class Server:
    """Accepts daemons and serves their requests, each as a task of its own."""

    def __init__(
        self, loop: Loop, listener: socket.socket, node: Callable[[], dict[str, Any]]
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._node = node
        self._connections: set[_Connection] = set()
        self._sandboxes: Sandboxes
        self._slots: Slots
        self._verbs: Verbs
        listener.setblocking(False)

    def start(
        self,
        *,
        sandboxes: Sandboxes,
        images: Images,
        slots: Slots,
        snapshots: Snapshots,
        transfers: Transfers,
        diffs: Diffs,
        spooler: Worker,
    ) -> None:
        self._sandboxes = sandboxes
        self._slots = slots
        self._verbs = Verbs(
            self._loop,
            node=self._node,
            sandboxes=sandboxes,
            images=images,
            slots=slots,
            snapshots=snapshots,
            transfers=transfers,
            diffs=diffs,
            processes=Processes(self._loop, spooler, self._process_exited),
        )
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def sandbox_died(self, sandbox: Sandbox) -> None:
        self._tell({"event": "sandbox-died", "sandbox": sandbox.id, "reason": sandbox.reason})

    def image_died(self, image: MountedImage) -> None:
        self._sandboxes.image_lost(image)
        self._tell({"event": "image-died", "key": image.key})

    def _process_exited(self, process: Process) -> None:
        self._tell(
            {
                "event": "process-exited",
                "sandbox": process.sandbox.id,
                "process": process.id,
                "exit": process.exit,
            }
        )

    def _tell(self, event: dict[str, Any]) -> None:
        for connection in list(self._connections):
            connection.send(event, ())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        self._connections.add(
            _Connection(self._loop, sock, self._requested, self._connections.discard)
        )

    def _requested(self, connection: _Connection, message: dict[str, Any], fds: list[int]) -> None:
        done = self._loop.spawn(self._verbs.serve(message, fds))
        done.watch(lambda: self._answer(connection, message, done))

    def _answer(
        self, connection: _Connection, message: dict[str, Any], done: Promise[Answer]
    ) -> None:
        if done.error is not None:
            body = _error_body(_named(done.error, zygote_dead=self._slots.zygote_dead))
            connection.send({"id": message.get("id"), "error": body}, ())
            return
        assert done.value is not None
        body, fds = done.value
        if not connection.send({"id": message.get("id"), "ok": body}, fds):
            # A daemon that took its place has asked for all there is, and may have done so before.
            self._loop.spawn(self._verbs.undo(message, body))
            if message.get("verb") == "mount":
                self._tell({"event": "image-mounted", **body})


class _Connection:
    """One daemon's socket. What it is given to send, descriptors included, is its own."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[_Connection, dict[str, Any], list[int]], None],
        on_closed: Callable[[_Connection], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._on_message = on_message
        self._on_closed = on_closed
        self._unsent: deque[tuple[dict[str, Any], tuple[int, ...]]] = deque()
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: dict[str, Any], fds: tuple[int, ...]) -> bool:
        """Send it, now or when the socket takes it; False if the daemon is gone."""
        if self._sock is None or len(self._unsent) >= UNSENT_MAX:
            close_fds(fds)
            self.close()
            return False
        self._unsent.append((message, fds))
        if len(self._unsent) == 1 and not self._flush():
            self._loop.add_writer(self._sock.fileno(), self._writable)
        return self._sock is not None

    def _flush(self) -> bool:
        """Send what waits; False if the socket takes no more for now."""
        while self._unsent and self._sock is not None:
            message, fds = self._unsent[0]
            try:
                protocol.send(self._sock, message, fds)
            except BlockingIOError:
                return False
            except OSError:
                self.close()
                return True
            self._unsent.popleft()
            close_fds(fds)
        return True

    def _writable(self) -> None:
        if self._flush() and self._sock is not None:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            message, fds = protocol.receive(self._sock)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            print(f"a daemon's connection is dropped: {error}", file=sys.stderr)
            self.close()
            return
        if message is None:
            self.close()
            return
        self._on_message(self, message, fds)

    def close(self) -> None:
        if self._sock is None:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._sock = None
        for _, fds in self._unsent:
            close_fds(fds)
        self._unsent.clear()
        self._on_closed(self)


def _named(error: BaseException, *, zygote_dead: bool) -> BaseException:
    """What an error is called. With the zygote every PID 1 has died, which each step under way
    meets in its own way: none of that is a sandbox's doing, nor a set-up that cannot be had."""
    of_the_request = isinstance(error, SandboxdError) and error.cause != "node"
    if zygote_dead and (not of_the_request or isinstance(error, SandboxDead)):
        return NodeUnavailable("a part of the node died; it starts anew")
    return error


def _error_body(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, SandboxdError):
        # Ours to mend: told in full on stderr, in general to the daemon.
        print(f"launcher: {type(error).__name__}: {error}", file=sys.stderr)
        error = NodeError("the launcher failed at a request", kind=type(error).__name__)
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "detail": error.detail,
    }
