"""The last hour of the node, a point every ten seconds: what the status page draws.

A ring in memory: a daemon that starts anew begins with none. Whoever wants more has Prometheus.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sandboxd.errors import SandboxdError
from sandboxd.linux import pressure
from sandboxd.runtime import own_process

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

EVERY_S: Final = 10.0
POINTS: Final = 360
LAG_EVERY_S: Final = 0.5
CALL_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Point:
    """Ten seconds. A figure that is not known, or of nothing, is None."""

    at: float
    sandboxes: int
    waiting: int
    creates: int
    create_p50_ms: float | None
    create_p95_ms: float | None
    execs: int
    exec_p50_ms: float | None
    exec_p95_ms: float | None
    memory_total_bytes: int
    memory_used_bytes: int
    """Of the whole machine."""
    sandboxes_memory_bytes: int | None
    """Of all sandboxes together, what they have written to memory included."""
    daemon_memory_bytes: int
    loop_lag_ms: float
    """The worst."""


class History:
    """Needs a running event loop."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self.points: deque[Point] = deque(maxlen=POINTS)
        self._lag_due = time.monotonic() + LAG_EVERY_S
        self._lag_timer = self._loop.call_later(LAG_EVERY_S, self._feel_lag)
        self._timer = self._loop.call_later(EVERY_S, self._tick)

    def _feel_lag(self) -> None:
        now = time.monotonic()
        self._runtime.meters.lag(max(0.0, now - self._lag_due))
        self._lag_due = now + LAG_EVERY_S
        self._lag_timer = self._loop.call_later(LAG_EVERY_S, self._feel_lag)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(EVERY_S, self._tick)
        self._runtime.spawn(self.write())

    async def write(self) -> None:
        """Add a point, of what was since the one before."""
        runtime, meters = self._runtime, self._runtime.meters
        creates, execs = sorted(meters.creates_now), sorted(meters.execs_now)
        meters.creates_now.clear()
        meters.execs_now.clear()
        lag_ms, meters.lag_worst_s = meters.lag_worst_s * 1000, 0.0
        sandboxes_bytes: int | None = None
        with suppress(SandboxdError, TimeoutError):
            async with asyncio.timeout(CALL_S):
                counts = (await runtime.node()).get("counts") or {}
            sandboxes_bytes = counts.get("memory_bytes")
        total_mb, available_mb = pressure.memory_mb()
        self.points.append(
            Point(
                at=time.time(),
                sandboxes=len(runtime.table),
                waiting=len(runtime.admission.room),
                creates=len(creates),
                create_p50_ms=quantile_ms(creates, 0.5),
                create_p95_ms=quantile_ms(creates, 0.95),
                execs=len(execs),
                exec_p50_ms=quantile_ms(execs, 0.5),
                exec_p95_ms=quantile_ms(execs, 0.95),
                memory_total_bytes=total_mb << 20,
                memory_used_bytes=(total_mb - available_mb) << 20,
                sandboxes_memory_bytes=sandboxes_bytes,
                daemon_memory_bytes=own_process.memory_bytes(),
                loop_lag_ms=round(lag_ms, 3),
            )
        )

    def close(self) -> None:
        self._timer.cancel()
        self._lag_timer.cancel()


def quantile_ms(ordered: Iterable[float], share: float) -> float | None:
    """The nearest rank's value, of seconds in order; None of none."""
    values = list(ordered)
    if not values:
        return None
    rank = min(len(values) - 1, max(0, -(-int(share * 100) * len(values) // 100) - 1))
    return round(values[rank] * 1000, 3)
