"""Workers that take one request at a time, so that one that blocks holds up its own lane only.

A lane is an image: what touches a stopped server blocks for as long as that is stopped, and a
create of another image must neither wait for it nor be taken for one that hangs. A worker that has
not answered after ``STALL_S`` is set aside with the request it is at, and a fresh one goes on with
the others; what belongs to the same lane waits until the first is answered. So there is one process
more for each server that hangs, and none as long as all is well.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.launcher.loop import Loop, Promise
from sandboxd.launcher.worker import Handler, Reply, Worker

STALL_S: Final = 0.5
"""A mount takes well under a millisecond; a worker that was set aside too early, on a machine that
is overrun, costs a fork."""
ASIDE_MAX: Final = 32


@dataclass(eq=False, slots=True)
class _Request:
    lanes: frozenset[str]
    op: str
    fds: tuple[int, ...]
    fields: dict[str, Any]
    answer: Promise[Reply]


class Lanes:
    """A worker and those set aside; asked like a ``Worker``, with the lanes a request touches."""

    def __init__(
        self, loop: Loop, name: str, handlers: Callable[[], Mapping[str, Handler]]
    ) -> None:
        self._loop = loop
        self._name = name
        self._handlers = handlers
        self._queue: deque[_Request] = deque()
        self._worker = Worker(loop, name, handlers)
        self._at: _Request | None = None
        self._aside: dict[_Request, Worker] = {}

    def request(
        self, op: str, fds: tuple[int, ...] = (), *, lanes: tuple[str, ...], **fields: Any
    ) -> Promise[Reply]:
        """As ``Worker.request``. The fds may be closed at once."""
        asked = _Request(
            frozenset(lanes), op, tuple(os.dup(fd) for fd in fds), fields, Promise(Reply.close)
        )
        self._queue.append(asked)
        self._go_on()
        return asked.answer

    def start(self) -> None:
        """Have the worker now, where the first request should not pay for it."""
        self._worker.start()

    def _go_on(self) -> None:
        blocked = {lane for stuck in self._aside for lane in stuck.lanes}
        for asked in self._queue if self._at is None else ():
            if blocked.isdisjoint(asked.lanes):
                break
            # What waits goes first in its lane.
            blocked |= asked.lanes
        else:
            return
        self._queue.remove(asked)
        self._at = asked
        reply = self._worker.request(asked.op, asked.fds, **asked.fields)
        for fd in asked.fds:
            with suppress(OSError):
                os.close(fd)
        self._loop.call_later(STALL_S, lambda: self._stalled(asked))
        reply.watch(lambda: self._answered(asked, reply))

    def _stalled(self, asked: _Request) -> None:
        if self._at is asked and len(self._aside) < ASIDE_MAX:
            self._aside[asked] = self._worker
            self._at = None
            self._worker = Worker(self._loop, self._name, self._handlers)
            self._go_on()

    def _answered(self, asked: _Request, reply: Promise[Reply]) -> None:
        worker = self._aside.pop(asked, None)
        if worker is None:
            self._at = None
        elif self._worker.is_started:
            worker.kill()
        else:
            self._worker = worker  # nobody asked in the meantime: it has its place again
        if reply.error is not None:
            asked.answer.reject(reply.error)
        else:
            assert reply.value is not None
            asked.answer.resolve(reply.value)
        self._go_on()
