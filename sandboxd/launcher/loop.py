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
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Task = Generator["Promise[Any]", Any, T]


class Promise(Generic[T]):
    """A value that is not there yet. Settled once; later settlements are ignored."""

    __slots__ = ("_watchers", "error", "settled", "value")

    def __init__(self) -> None:
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


class Loop:
    """Readers by fd, timers, and the tasks that are ready to go on."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ready: deque[Callable[[], None]] = deque()
        self._stopped = False

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``fd`` is readable or at its end (level-triggered)."""
        self._readers[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def remove_reader(self, fd: int) -> None:
        """Before the fd is closed: epoll keeps what a copy of it is still open."""
        if self._readers.pop(fd, None):
            self._epoll.unregister(fd)

    def call_at(self, deadline: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (deadline, next(self._order), callback))

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.call_at(time.monotonic() + delay_s, callback)

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
        """The promise's value; TimeoutError(what) if it takes longer."""
        first: Promise[T] = Promise()

        def copy() -> None:
            if promise.error is not None:
                first.reject(promise.error)
            else:
                first.resolve(promise.value)  # type: ignore[arg-type]

        promise.watch(copy)
        if not first.settled:
            self.call_later(timeout_s, lambda: first.reject(TimeoutError(what)))
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
            while self._timers and self._timers[0][0] <= now:
                self._call(heapq.heappop(self._timers)[2])
            if self._ready or self._stopped:
                continue
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1
            for fd, _ in self._epoll.poll(timeout):
                callback = self._readers.get(fd)
                if callback:
                    self._call(callback)

    @staticmethod
    def _call(callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - one sandbox's trouble is not the node's
            traceback.print_exc(file=sys.stderr)
