"""A loop of generator tasks over epoll: how the single-threaded launcher waits for many at once.

Not asyncio: the launcher forks (workers, squashfuse), and asyncio's state does not survive that;
nor does it need streams, executors or cancellation. A task is a generator that yields a
``Promise`` and is resumed with its value, or with its error thrown into it. A step that takes
several of them is a generator too, called with ``yield from``.
"""

from __future__ import annotations

import heapq
import itertools
import select
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, TypeVar

TIMERS_SWEPT: Final = 1024
"""More timers than this are looked through for cancelled ones."""

T = TypeVar("T")
Task = Generator["Promise[Any]", Any, T]


class Promise(Generic[T]):
    """A value that is not there yet. Settled once; later settlements are ignored.

    ``discard`` takes a value that comes when nobody waits any more: one that holds descriptors.
    """

    __slots__ = ("_discard", "_watchers", "error", "settled", "value")

    def __init__(self, discard: Callable[[T], None] | None = None) -> None:
        self._discard = discard
        self.settled = False
        self.value: T | None = None
        self.error: BaseException | None = None
        self._watchers: list[Callable[[], None]] = []

    def resolve(self, value: T) -> None:
        self._settle(value, None)

    def reject(self, error: BaseException) -> None:
        self._settle(None, error)

    def _settle(self, value: T | None, error: BaseException | None) -> None:
        if self.settled:
            return
        self.settled, self.value, self.error = True, value, error
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` once settled; at once if it is."""
        if self.settled:
            watcher()
        else:
            self._watchers.append(watcher)

    def abandon(self) -> None:
        """Nobody waits for the value: should it still come, it is discarded."""
        discard, self._discard = self._discard, None
        if discard is not None:
            self.watch(lambda: None if self.value is None else discard(self.value))


class Timer:
    """A callback that waits for its time; ``cancel`` lets go of it and of all it holds."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Readers and writers by fd, timers, and the tasks that are ready to go on."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._sweep_at = TIMERS_SWEPT
        self._order = itertools.count()
        self._ready: deque[Callable[[], None]] = deque()
        self._stopped = False

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``fd`` is readable or at its end (level-triggered)."""
        self._watch(fd, self._readers, callback)

    def remove_reader(self, fd: int) -> None:
        """Before the fd is closed: epoll keeps what a copy of it is still open."""
        self._forget(fd, self._readers)

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``fd`` can be written to (level-triggered)."""
        self._watch(fd, self._writers, callback)

    def remove_writer(self, fd: int) -> None:
        self._forget(fd, self._writers)

    def _watch(
        self, fd: int, side: dict[int, Callable[[], None]], callback: Callable[[], None]
    ) -> None:
        known = fd in self._readers or fd in self._writers
        events = self._events(fd) | (select.EPOLLIN if side is self._readers else select.EPOLLOUT)
        if known:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        side[fd] = callback

    def _forget(self, fd: int, side: dict[int, Callable[[], None]]) -> None:
        if side.pop(fd, None) is None:
            return
        if events := self._events(fd):
            self._epoll.modify(fd, events)
        else:
            self._epoll.unregister(fd)

    def _events(self, fd: int) -> int:
        reads = select.EPOLLIN if fd in self._readers else 0
        return reads | (select.EPOLLOUT if fd in self._writers else 0)

    def call_at(self, deadline: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (deadline, next(self._order), timer))
        if len(self._timers) > self._sweep_at:
            # Most time-outs never happen; they would pile up for as long as they last.
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._sweep_at = max(TIMERS_SWEPT, 2 * len(self._timers))
        return timer

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return self.call_at(time.monotonic() + delay_s, callback)

    def stop(self) -> None:
        self._stopped = True

    def spawn(self, task: Task[Any]) -> Promise[Any]:
        """Run a task; its promise is settled with what it returns or raises."""
        done: Promise[Any] = Promise()

        def resume(promise: Promise[Any] | None) -> None:
            try:
                if promise is None:
                    awaited = next(task)
                elif promise.error is not None:
                    awaited = task.throw(promise.error)
                else:
                    awaited = task.send(promise.value)
            except StopIteration as stop:
                done.resolve(stop.value)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the task
                done.reject(error)
            else:
                awaited.watch(lambda: self._ready.append(lambda: resume(awaited)))

        self._ready.append(lambda: resume(None))
        return done

    def wait(self, promise: Promise[T], timeout_s: float, what: str) -> Task[T]:
        """The promise's value; TimeoutError(what) if it takes longer: then it is abandoned."""
        first: Promise[T] = Promise()

        def copy() -> None:
            if promise.error is not None:
                first.reject(promise.error)
            else:
                first.resolve(promise.value)  # type: ignore[arg-type]

        def too_late() -> None:
            first.reject(TimeoutError(what))
            promise.abandon()

        promise.watch(copy)
        if not first.settled:
            first.watch(self.call_later(timeout_s, too_late).cancel)
        value: T = yield first
        return value

    def sleep(self, delay_s: float) -> Task[None]:
        elapsed: Promise[None] = Promise()
        self.call_later(delay_s, lambda: elapsed.resolve(None))
        yield elapsed

    def run(self) -> None:
        """Until ``stop``. A callback that raises is reported and does not end the loop."""
        while not self._stopped:
            while self._ready:
                self._call(self._ready.popleft())
            now = time.monotonic()
            while self._timers and (
                self._timers[0][0] <= now or self._timers[0][2].callback is None
            ):
                due = heapq.heappop(self._timers)[2].callback
                if due is not None:
                    self._call(due)
            if self._ready or self._stopped:
                continue
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1
            self._dispatch(self._epoll.poll(timeout))

    def _dispatch(self, events: list[tuple[int, int]]) -> None:
        """Only what was watched when it happened: a callback may close an fd whose event is in the
        same batch, and its number may already be another's."""
        batch = [
            (fd, side, side.get(fd))
            for fd, mask in events
            for side, wanted in (
                (self._readers, ~select.EPOLLOUT),
                (self._writers, ~select.EPOLLIN),
            )
            if mask & wanted
        ]
        for fd, side, callback in batch:
            if callback is not None and side.get(fd) is callback:
                self._call(callback)

    @staticmethod
    def _call(callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - one sandbox's trouble is not the node's
            traceback.print_exc(file=sys.stderr)
