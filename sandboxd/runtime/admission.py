"""Who may have a sandbox now, and when to come back who may not.

A create passes, in this order: the drain, the end of its run, its run's quotas, the pressure of the
machine, the room by the ledger (``capacity``). What it asks for and can never have is its own
mistake; what it cannot have now it may wait for (``waiting``), or it is told when to come back.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

from sandboxd.config import Config
from sandboxd.errors import NodeOverloaded, QuotaExceeded, RequestError, SandboxdError
from sandboxd.model import SandboxSpec
from sandboxd.runtime import pressure
from sandboxd.runtime.capacity import Amounts, Ledger, demand
from sandboxd.runtime.drain import Drain
from sandboxd.runtime.pressure import Pressure
from sandboxd.runtime.runs import RunTable
from sandboxd.runtime.waiting import Request, Shortage, WaitingRoom

WINDOW_S: Final = 30.0
"""Seats that became free in so long tell how soon the next will."""
UNKNOWN_S: Final = 5.0
"""Where none has ended lately: most are deleted long before they end by themselves."""
LONGEST_S: Final = 60.0
"""Nobody is sent away for longer: who gave up meanwhile cannot be told from who will come."""
SPREAD_S: Final = 0.02
"""Between two that come back, where nothing tells how soon seats become free."""
_WORDS: Final = {
    "sandboxes": "the node has its {most:g} sandboxes",
    "memory_mb": "the node's {most:g} MiB of memory and disk are promised",
    "cpus": "the node's {most:g} CPUs are promised",
    "pids": "the node's {most:g} processes are promised",
    "fds": "the node's {most:g} file descriptors are spoken for",
}


class Comeback:
    """When whoever is refused should come back: each is given a time of its own, as far behind the
    one before as seats became free lately, or they would all come at once and be refused again."""

    def __init__(self) -> None:
        self._freed_at: deque[float] = deque()
        self._last = 0.0

    def freed(self, now: float) -> None:
        self._freed_at.append(now)
        while self._freed_at[0] < now - WINDOW_S:
            self._freed_at.popleft()

    def after_s(self, now: float, waiting: int, next_due_s: float) -> int:
        """Whole seconds, 1 at least. ``waiting`` are before it; ``next_due_s`` is when a sandbox
        ends by itself, should none have ended lately."""
        while self._freed_at and self._freed_at[0] < now - WINDOW_S:
            self._freed_at.popleft()
        if self._freed_at:
            # Over the time seen: a burst that began a second ago is no rate of half a minute.
            each_s = max(now - self._freed_at[0], 1.0) / len(self._freed_at)
            first_s = each_s * (waiting + 1)
        else:
            each_s, first_s = SPREAD_S, min(next_due_s, UNKNOWN_S)
        at = min(max(now + first_s, self._last + each_s), now + LONGEST_S)
        self._last = at
        return max(1, math.ceil(at - now))


class Admission:
    """``next_due_s`` tells when the next sandbox ends by itself. Needs a running event loop."""

    def __init__(
        self,
        config: Config,
        capacity: Amounts,
        *,
        runs: RunTable,
        drain: Drain,
        next_due_s: Callable[[], float],
        read: Callable[[], pressure.Sample] | None = None,
    ) -> None:
        self._runs = runs
        self._drain = drain
        self._next_due_s = next_due_s
        self.ledger = Ledger(capacity)
        self.refused: Counter[str] = Counter()
        """Creates that were sent away, by what there was too little of."""
        self._comeback = Comeback()
        self.room = WaitingRoom(self._seat, lambda one: self.leave(one.sandbox_id), self._refusal)
        self.pressure = Pressure(config, self.room.wake, read)

    async def enter(self, sandbox_id: str, spec: SandboxSpec, wait_s: float) -> None:
        """Take a seat, waiting ``wait_s`` at most; it is the caller's to ``leave``.

        Raises NodeDraining, RunEnded, QuotaExceeded, NodeOverloaded, RequestError.
        """
        self.check(spec)
        request = Request(sandbox_id, spec.run, demand(spec.limits))
        never = request.amounts.short_of(self.ledger.capacity)
        if never is not None:
            raise RequestError(
                f"limits need {getattr(request.amounts, never):g} of {never},"
                f" the whole node has {getattr(self.ledger.capacity, never):g}",
                resource=never,
            )
        await self.room.enter(request, wait_s)
        try:
            self.check(spec)  # it may have waited, and be called in the turn in which that ended
        except SandboxdError:
            self.leave(sandbox_id)
            raise

    def check(self, spec: SandboxSpec) -> None:
        """Raises NodeDraining, RunEnded."""
        self._drain.check()
        self._runs.check_open(spec.run)

    def adopt(self, sandbox_id: str, spec: SandboxSpec) -> None:
        """Count one that lives already, whether there is room for it or not."""
        self.ledger.take(sandbox_id, spec.run, demand(spec.limits))

    def leave(self, sandbox_id: str) -> None:
        """A seat is free again. Idempotent."""
        if self.ledger.give(sandbox_id) is not None:
            self._comeback.freed(time.monotonic())
            self.room.wake()

    def reconfigure(self, config: Config, capacity: Amounts) -> None:
        """Go by other settings from now on; nobody who has a seat loses it."""
        self.pressure.config = config
        self.ledger.capacity = capacity
        self.room.wake()

    def close(self) -> None:
        self.pressure.close()
        self.room.close()

    def _seat(self, request: Request) -> Shortage | None:
        own = self._runs.shortage(request.run, self.ledger.of_run(request.run))
        if own is not None:
            return own
        if self.pressure.closed_by:
            why = ", ".join(self.pressure.closed_by)
            return Shortage("pressure", f"the node is hard-pressed ({why})")
        short = self.ledger.short(request.amounts)
        if short is not None:
            most = getattr(self.ledger.capacity, short)
            return Shortage(short, _WORDS[short].format(most=most))
        self._runs.spend(request.run)
        self.ledger.take(request.sandbox_id, request.run, request.amounts)
        return None

    def _refusal(self, shortage: Shortage, request: Request) -> SandboxdError:
        self.refused[shortage.reason] += 1
        detail: dict[str, Any] = {"reason": shortage.reason, "waiting": len(self.room)}
        if shortage.own:
            if shortage.ready_in_s is not None:
                detail["retry_after_s"] = max(1, math.ceil(shortage.ready_in_s))
            else:
                detail["retry_after_s"] = self._after_s(self.room.of_run(request.run))
            return QuotaExceeded(shortage.message, run=request.run, **detail)
        if shortage.reason == "pressure":
            detail["retry_after_s"] = pressure.RETRY_AFTER_S
        else:
            detail["retry_after_s"] = self._after_s(len(self.room))
        return NodeOverloaded(shortage.message, **detail)

    def _after_s(self, waiting: int) -> int:
        return self._comeback.after_s(time.monotonic(), waiting, self._next_due_s())

    def to_json(self) -> dict[str, Any]:
        """What the node has, what of it is promised, and why nothing more is taken on, if so."""
        draining = self._drain.draining
        full = [
            name
            for name, most in self.ledger.capacity.to_json().items()
            if getattr(self.ledger.used, name) >= most
        ]
        closed = ["draining"] if draining else []
        closed += [*self.pressure.closed_by, *full]
        return {
            "open": not closed,
            "closed_by": closed,
            "capacity": self.ledger.capacity.to_json(),
            "used": self.ledger.used.to_json(),
            "waiting": len(self.room),
            "pressure": self.pressure.to_json(),
        }
