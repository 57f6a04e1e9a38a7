"""The worker that empties the pipes of background processes into their spools (``spool.py``).

A process of its own, so that the launcher never copies output: a program that does nothing but
write must not stand in the way of a create. For the same reason it yields to others (nice) and
takes ``SLICE_BYTES`` in ``SLICE_S`` at most, over all streams in turn; what writes faster waits at
its pipe, as it would for any reader.

Bytes go from pipe to memfd by splice(2), past this program's own memory. After each move the
process's eventfd is written, which wakes a daemon that waits for output.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from sandboxd.launcher import worker
from sandboxd.launcher.spool import SpoolWriter

NICE: Final = 10
CHUNK_BYTES: Final = 256 * 1024
SLICE_S: Final = 0.01
SLICE_BYTES: Final = 512 * 1024
"""Fifty megabytes a second in all: what floods beyond that sleeps at its pipe and costs no CPU."""
DRAIN_BYTES_MAX: Final = 1 << 20
"""fs.pipe-max-size: what a pipe may hold when its writer ends (``runtime/pipes.py``)."""


@dataclass(slots=True)
class _Stream:
    fd: int
    """-1 once it is at its end."""
    spool: SpoolWriter
    is_tty: bool
    process: _Process


@dataclass(slots=True)
class _Process:
    event_fd: int
    streams: list[_Stream] = field(default_factory=list)


class Spooler:
    """Everything the process has: its socket, its streams, and one epoll over both."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._epoll = select.epoll()
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._processes: dict[str, _Process] = {}
        self._streams: dict[int, _Stream] = {}

    def run(self) -> None:
        """Until the launcher is gone."""
        handlers = {
            "open": self._open,
            "drain": self._drain,
            "fds": self._fds,
            "drop": self._drop,
        }
        slice_ends, left = 0.0, 0
        while True:
            now = time.monotonic()
            if now >= slice_ends:
                slice_ends, left = now + SLICE_S, SLICE_BYTES
            if left <= 0:
                # The streams wait; whoever asks does not.
                if select.select([self._sock], [], [], slice_ends - now)[0] and not (
                    worker.serve_one(self._sock, handlers)
                ):
                    return
                continue
            for fd, _ in self._epoll.poll():
                if fd == self._sock.fileno():
                    if not worker.serve_one(self._sock, handlers):
                        return
                elif fd in self._streams and left > 0:
                    left -= self._fill(self._streams[fd], CHUNK_BYTES)

    def _fill(self, stream: _Stream, limit: int) -> int:
        """Move what is there; 0 where there is nothing, or no more ever."""
        try:
            moved = stream.spool.fill(stream.fd, limit, is_tty=stream.is_tty)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: the terminal's last user has closed it
            moved = 0
        if not moved:
            self._end(stream)
        self._wake(stream.process)
        return moved

    @staticmethod
    def _wake(process: _Process) -> None:
        with suppress(BlockingIOError):  # its counter is full: awake it is
            os.eventfd_write(process.event_fd, 1)

    def _end(self, stream: _Stream) -> None:
        if stream.fd < 0:
            return
        stream.spool.end()
        self._epoll.unregister(stream.fd)
        del self._streams[stream.fd]
        os.close(stream.fd)
        stream.fd = -1

    # --- what the launcher asks --------------------------------------------------------------

    def _open(self, request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        process = _Process(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._processes[request["process"]] = process
        for fd in fds:
            os.set_blocking(fd, False)
            stream = _Stream(fd, SpoolWriter(request["capacity"]), request["tty"], process)
            process.streams.append(stream)
            self._streams[fd] = stream
            self._epoll.register(fd, select.EPOLLIN)
        fds.clear()  # kept, not to be closed after the answer
        return {}, self._copies(process)

    def _fds(self, request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        del fds
        process = self._processes.get(request["process"])
        if process is None:
            raise FileNotFoundError(errno.ENOENT, "the spool is lost")
        return {}, self._copies(process)

    @staticmethod
    def _copies(process: _Process) -> tuple[int, ...]:
        """The eventfd, then a memfd for each stream; to be closed once they are sent."""
        return tuple(
            os.dup(fd) for fd in (process.event_fd, *(s.spool.fd for s in process.streams))
        )

    def _drain(self, request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        """Take what a process that has ended left in its pipes."""
        del fds
        process = self._processes.get(request["process"])
        for stream in process.streams if process else ():
            left = DRAIN_BYTES_MAX
            while left > 0 and stream.fd >= 0:
                moved = self._fill(stream, min(left, CHUNK_BYTES))
                if not moved:
                    break
                left -= moved
        return {}, ()

    def _drop(self, request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        del fds
        process = self._processes.pop(request["process"], None)
        if process is not None:
            for stream in process.streams:
                self._end(stream)
                stream.spool.close()
            self._wake(process)
            os.close(process.event_fd)
        return {}, ()


def main(sock: socket.socket) -> None:
    """The body of the process; see ``Worker``."""
    os.nice(NICE)
    sock.setblocking(True)
    Spooler(sock).run()
