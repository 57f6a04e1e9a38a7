"""When each sandbox's time is up: one heap and one timer for all of them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

SWEPT: Final = 1024
"""More entries than this are looked through for those that no longer matter."""


class Expiry:
    """Calls ``on_due(id)`` once an entry's delay has passed. Entries are not taken back: whoever is
    called looks whether it still matters. ``matters`` says so ahead of time, or a node with an hour
    of TTL would keep an hour of what was deleted. Needs a running event loop."""

    def __init__(
        self, on_due: Callable[[str], None], matters: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_due = on_due
        self._matters = matters
        self._sweep_at = SWEPT
        self._heap: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sandbox_id: str, delay_s: float) -> None:
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        entry = (self._loop.time() + max(delay_s, 0.0), sandbox_id)
        heapq.heappush(self._heap, entry)
        if self._heap[0] is entry:
            self._arm()

    def next_s(self, most: float = 60.0) -> float:
        """Until the next entry is due; ``most`` where that is later, or there is none."""
        if not self._heap:
            return most
        return min(max(self._heap[0][0] - self._loop.time(), 0.0), most)

    def _sweep(self) -> None:
        """Keep the first entry of each that matters: at that one it is looked at again."""
        first: dict[str, float] = {}
        for at, sandbox_id in self._heap:
            if self._matters(sandbox_id):
                first[sandbox_id] = min(at, first.get(sandbox_id, at))
        self._heap = [(at, sandbox_id) for sandbox_id, at in first.items()]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEPT, 2 * len(self._heap))

    def __len__(self) -> int:
        return len(self._heap)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer = self._loop.call_at(self._heap[0][0], self._fire)

    def _fire(self) -> None:
        # Timers may fire a clock tick early.
        now = self._loop.time() + 0.001
        while self._heap and self._heap[0][0] <= now:
            self._on_due(heapq.heappop(self._heap)[1])
        self._arm()

    def close(self) -> None:
        self._heap.clear()
        self._arm()
