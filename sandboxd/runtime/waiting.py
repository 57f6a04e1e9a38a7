"""The bounded room in which creates wait for a seat on a full node.

Each run has a queue of its own and the runs take turns, so that one that asks for a thousand does
not keep another from its first. Within a run it is first come, first served. Nobody waits longer
than it asked to, and no more wait than there are chairs; the rest is refused at once, so that a
node that is too small says so instead of growing a queue. When all chairs are taken, a run with
fewer of them gets one of the run with most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sandboxd.errors import SandboxdError
from sandboxd.runtime.capacity import Amounts

CHAIRS: Final = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """Who wants a seat, and how large a one."""

    sandbox_id: str
    run: str
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why there is no seat now. ``own``: for this run only, others may have one. ``ready_in_s``:
    when that is over by itself, where it is."""

    reason: str
    message: str
    own: bool = False
    ready_in_s: float | None = None


@dataclass(eq=False, slots=True)
class _Waiter:
    request: Request
    turn: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class _Queue:
    waiters: deque[_Waiter] = field(default_factory=deque)
    shortage: Shortage | None = None
    """What its first was refused for last."""


class WaitingRoom:
    """``seat`` takes a seat for a request, or says why there is none; ``leave`` gives it back;
    ``refusal`` makes the error of a shortage. Whoever frees a seat calls ``wake``. Needs a running
    event loop."""

    def __init__(
        self,
        seat: Callable[[Request], Shortage | None],
        leave: Callable[[Request], None],
        refusal: Callable[[Shortage, Request], SandboxdError],
        chairs: int = CHAIRS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._seat = seat
        self._leave = leave
        self._refusal = refusal
        self._chairs = chairs
        self._queues: dict[str, _Queue] = {}
        """In the order of their turns."""
        self._blocked: Shortage | None = None
        """What keeps whoever's turn it is out, and so everybody."""
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._waiting

    def of_run(self, run: str) -> int:
        queue = self._queues.get(run)
        return len(queue.waiters) if queue else 0

    async def enter(self, request: Request, wait_s: float) -> None:
        """Return once the seat is taken. Raises what ``refusal`` makes where there is none within
        ``wait_s``, or what ``refuse`` was given."""
        self.wake()
        shortage = self._blocked
        if shortage is None and (queue := self._queues.get(request.run)) is not None:
            shortage = queue.shortage
        if shortage is None:
            shortage = self._seat(request)
        if shortage is None:
            return
        if wait_s <= 0 or not self._has_chair(request.run):
            raise self._refusal(shortage, request)
        waiter = _Waiter(request, self._loop.create_future())
        self._queues.setdefault(request.run, _Queue(shortage=shortage)).waiters.append(waiter)
        self._waiting += 1
        self.wake()
        try:
            async with asyncio.timeout(wait_s):
                await waiter.turn
        except BaseException as error:
            turn = waiter.turn
            if not self._remove(waiter) and not turn.cancelled() and turn.exception() is None:
                # Seated in the very turn in which it gave up: the seat is the next one's.
                self._leave(request)
            self.wake()
            if isinstance(error, TimeoutError):
                raise self._refusal(shortage, request) from None
            raise

    def wake(self) -> None:
        """Seats may have become free."""
        self._blocked = None
        seated = True
        while seated and self._blocked is None:
            seated = False
            for run in list(self._queues):
                queue = self._queues[run]
                queue.shortage = self._seat(queue.waiters[0].request)
                if queue.shortage is None:
                    self._drop(run, queue.waiters[0]).turn.set_result(None)
                    if run in self._queues:
                        self._queues[run] = self._queues.pop(run)  # its turn comes last now
                    seated = True
                    break
                if not queue.shortage.own:
                    self._blocked = queue.shortage
                    break
        self._arm()

    def refuse(self, error: Callable[[], SandboxdError], run: str | None = None) -> int:
        """Send everybody away, or everybody of a run; how many."""
        queues = list(self._queues) if run is None else [run] if run in self._queues else []
        waiters = [waiter for name in queues for waiter in self._queues[name].waiters]
        for waiter in waiters:
            self._drop(waiter.request.run, waiter).turn.set_exception(error())
        return len(waiters)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _has_chair(self, run: str) -> bool:
        """Whether there is one, or one could be had of the run that has most."""
        if self._waiting < self._chairs:
            return True
        longest = max(self._queues, key=lambda name: len(self._queues[name].waiters))
        if self.of_run(run) + 1 >= self.of_run(longest):
            return False
        queue = self._queues[longest]
        last = self._drop(longest, queue.waiters[-1])
        shortage = Shortage("waiting", "as many are waiting for room as may")
        last.turn.set_exception(self._refusal(shortage, last.request))
        return True

    def _remove(self, waiter: _Waiter) -> bool:
        queue = self._queues.get(waiter.request.run)
        if queue is None or waiter not in queue.waiters:
            return False
        self._drop(waiter.request.run, waiter)
        return True

    def _drop(self, run: str, waiter: _Waiter) -> _Waiter:
        queue = self._queues[run]
        queue.waiters.remove(waiter)
        self._waiting -= 1
        if not queue.waiters:
            del self._queues[run]
        return waiter

    def _arm(self) -> None:
        """Look again when what keeps a run out is over by itself: nobody frees anything then."""
        self.close()
        pauses = [
            queue.shortage.ready_in_s
            for queue in self._queues.values()
            if queue.shortage is not None and queue.shortage.ready_in_s is not None
        ]
        if pauses:
            self._timer = self._loop.call_later(max(min(pauses), 0.001), self.wake)
