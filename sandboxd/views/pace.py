"""How fast one sandbox may ask: an allowance of requests, and above it they wait for their turn.

The server has one thread and takes requests in the order in which they come, so what a sandbox asks
in a loop is time that the others wait. A request that is over the allowance is not answered before
its turn; the process that made it sleeps meanwhile, and asks nothing more.
"""

from __future__ import annotations

from typing import Final

RATE: Final = 200.0
"""Requests a second, once the allowance is used up: 2 % of one CPU at 0.1 ms each. ``cat`` of a
file makes four."""
BURST: Final = 1000.0
"""What may be asked at once after a rest: of a parallel build each process sizes itself."""
WAIT_MAX_S: Final = 2.0
"""No request waits longer, whatever is before it."""


class Pace:
    """The allowance of one sandbox."""

    __slots__ = ("_next_s",)

    def __init__(self) -> None:
        self._next_s = 0.0

    def delay_s(self, now_s: float) -> float:
        """Count one request at ``now_s``; how long it has to wait."""
        self._next_s = max(self._next_s, now_s - BURST / RATE) + 1 / RATE
        delay = min(self._next_s - now_s, WAIT_MAX_S)
        self._next_s = min(self._next_s, now_s + WAIT_MAX_S)
        return max(0.0, delay)
