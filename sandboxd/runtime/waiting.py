"""The bounded room in which creates wait for a seat on a full node.

First come, first served: a newcomer does not pass those that wait. Nobody waits longer than it
asked to, and no more wait than there are chairs; the rest is refused at once, so that a node that
is too small says so instead of growing a queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from sandboxd.errors import NodeOverloaded

CHAIRS: Final = 1024
RETRY_AFTER_S: Final = 1


class WaitingRoom:
    """``free`` says how many seats there are now; whoever frees one calls ``wake``.

    A seat is taken by what ``free`` counts, in the same turn of the event loop in which ``enter``
    returns. Needs a running event loop.
    """

    def __init__(self, free: Callable[[], int], full_message: Callable[[], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._free = free
        self._full_message = full_message
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._called = 0
        """Woken, and not back from ``enter`` yet: their seats are spoken for."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def enter(self, wait_s: float) -> None:
        """Return once there is a seat. Raises NodeOverloaded where there is none within
        ``wait_s``."""
        if not self._waiting and self._free() - self._called > 0:
            return
        if wait_s <= 0 or len(self._waiting) >= CHAIRS:
            raise self._full()
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                # Called in the very turn in which it gave up: the seat is the next one's.
                self._called -= 1
                self.wake()
            else:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise self._full() from None
            raise
        self._called -= 1

    def wake(self) -> None:
        """Seats may have become free."""
        while self._waiting and self._free() - self._called > 0:
            self._called += 1
            self._waiting.popleft().set_result(None)

    def _full(self) -> NodeOverloaded:
        return NodeOverloaded(
            self._full_message(), retry_after_s=RETRY_AFTER_S, waiting=len(self._waiting)
        )
