"""Pipe ends in the event loop: feeding bytes, and what a command's children leave behind.

A command ends when its main process does. A server that it left in the background still holds the
pipes: closing our ends would kill it with SIGPIPE at its next line of log, and not reading them
would block it once the pipe is full. So such pipes are drained into nothing, slowly, so that a
background ``yes`` costs the daemon next to nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CHUNK_BYTES: Final = 65536
"""The default capacity of a pipe: one read can take it all."""

PIPE_CAPACITY_MAX: Final = 1 << 20
"""fs.pipe-max-size: what F_SETPIPE_SZ gives a process without CAP_SYS_RESOURCE on the host. So
nothing that was in a pipe when a process ended lies beyond that many bytes."""


class Feeder:
    """Writes ``data`` to a pipe as it is taken, then closes it; a reader that goes is no error."""

    def __init__(self, fd: int, data: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._rest = memoryview(data)
        self._waiting = False
        os.set_blocking(fd, False)
        self._write()

    def _write(self) -> None:
        while self._rest:
            try:
                sent = os.write(self._fd, self._rest[:PIPE_CAPACITY_MAX])
            except BlockingIOError:
                if not self._waiting:
                    self._waiting = True
                    self._loop.add_writer(self._fd, self._write)
                return
            except OSError:  # EPIPE: the command closed its stdin or ended
                break
            self._rest = self._rest[sent:]
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            if self._waiting:
                self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._rest = memoryview(b"")


class Leftovers:
    """The read ends of pipes whose command has ended while someone still holds the other end.

    Bounded in number (the oldest is closed) and in speed. One object a sandbox.
    """

    PIPES_MAX: Final = 32
    PAUSE_S: Final = 0.05
    """A full pipe of 64 KiB every 50 ms: 1.3 MB/s at most."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pipes: OrderedDict[int, asyncio.TimerHandle | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pipes)

    def adopt(self, fd: int) -> None:
        """Take over a non-blocking read end."""
        while len(self._pipes) >= self.PIPES_MAX:
            self._drop(next(iter(self._pipes)))
        self._pipes[fd] = None
        self._loop.add_reader(fd, self._readable, fd)

    def _readable(self, fd: int) -> None:
        if is_drained(fd):
            self._drop(fd)
            return
        self._loop.remove_reader(fd)
        self._pipes[fd] = self._loop.call_later(self.PAUSE_S, self._resume, fd)

    def _resume(self, fd: int) -> None:
        self._pipes[fd] = None
        self._loop.add_reader(fd, self._readable, fd)

    def _drop(self, fd: int) -> None:
        timer = self._pipes.pop(fd)
        if timer is None:
            self._loop.remove_reader(fd)
        else:
            timer.cancel()
        os.close(fd)

    def close(self) -> None:
        for fd in list(self._pipes):
            self._drop(fd)


def is_drained(fd: int) -> bool:
    """Throw away up to CHUNK_BYTES; True at the end of the stream (or an error, which is one)."""
    try:
        return not os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_available(fd: int, feed: Callable[[bytes], None], limit: int = PIPE_CAPACITY_MAX) -> bool:
    """Feed what is in a non-blocking pipe now, ``limit`` bytes and a chunk at most: a background
    writer could go on for ever. True at the end of the stream."""
    taken = 0
    while taken < limit:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if not data:
            return True
        feed(data)
        taken += len(data)
    return False
