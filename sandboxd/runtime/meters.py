"""What the daemon counts while it works: the figures behind ``/metrics`` and the status page.

For: the node as a whole. Not for: one sandbox (its events, its stats); nothing here is kept by
sandbox, run or image, so that it is as large after a year as after a minute.

All is plain arithmetic in the event loop's thread, a few hundred nanoseconds a request and without
the locks that a general metrics library has for every figure; ``exposition`` gives it names.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sandboxd.errors import SandboxdError
from sandboxd.model import Event, ExecResult

CREATE_BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    60.0,
)
EXEC_BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 1800.0, 7200.0),
)
LAG_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
SERIES_MAX: Final = 256
"""Of one counter with labels; the rest is counted together as ``other``. The labels are ours (codes
and reasons): there are some dozens."""
SAMPLES_MAX: Final = 4096
"""Durations kept of one interval of the history: the newest."""
_REASON: Final = re.compile(r"[a-z][a-z0-9_-]{0,39}")


class Histogram:
    """Observations by upper bound; the last count is of those above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Labelled:
    """Counts by a tuple of labels."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *labels: str) -> None:
        if labels not in self.counts and len(self.counts) >= SERIES_MAX:
            labels = ("other",) * len(labels)
        self.counts[labels] += 1


class Meters:
    """One for a daemon."""

    def __init__(self) -> None:
        self.create_phases: dict[str, Histogram] = {"total": Histogram(CREATE_BOUNDS_S)}
        self.deletes = Histogram(CREATE_BOUNDS_S)
        self.exec_seconds = Histogram(EXEC_BOUNDS_S)
        self.exec_ends: Counter[str] = Counter({"exited": 0, "timed-out": 0, "oom-killed": 0})
        self.exec_failures = Labelled()
        """By code and cause."""
        self.refusals = Labelled()
        """Requests that were answered with an error, by code, cause and reason."""
        self.sandbox_failures = Labelled()
        """By code and reason."""
        self.events: Counter[str] = Counter()
        self.oom_kills = 0
        self.loop_lag = Histogram(LAG_BOUNDS_S)
        self.lag_worst_s = 0.0
        self.creates_now: deque[float] = deque(maxlen=SAMPLES_MAX)
        self.execs_now: deque[float] = deque(maxlen=SAMPLES_MAX)
        """Seconds, since the history was last written."""

    def created(self, phases_ms: Mapping[str, float]) -> None:
        for name, value_ms in phases_ms.items():
            meter = self.create_phases.get(name)
            if meter is None:
                if len(self.create_phases) >= SERIES_MAX:
                    continue
                meter = self.create_phases[name] = Histogram(CREATE_BOUNDS_S)
            meter.observe(value_ms / 1000)
        self.creates_now.append(phases_ms.get("total", 0.0) / 1000)

    def exec_ended(self, result: ExecResult) -> None:
        self.exec_seconds.observe(result.wall_s)
        self.execs_now.append(result.wall_s)
        end = "exited"
        if result.timed_out:
            end = "timed-out"
        elif result.oom_killed:
            end = "oom-killed"
        self.exec_ends[end] += 1

    def exec_failed(self, error: SandboxdError) -> None:
        self.exec_failures.add(error.code, error.cause)

    def refused(self, error: SandboxdError) -> None:
        """A request that is answered with ``error``."""
        self.refusals.add(error.code, error.cause, reason_of(error.detail))

    def event(self, event: Event) -> None:
        self.events[event.kind] += 1
        if event.kind == "failed":
            self.sandbox_failures.add(str(event.detail.get("code", "")), reason_of(event.detail))

    def lag(self, seconds: float) -> None:
        self.loop_lag.observe(seconds)
        self.lag_worst_s = max(self.lag_worst_s, seconds)


def reason_of(detail: Mapping[str, Any]) -> str:
    """``reason`` where it is one of our words."""
    reason = detail.get("reason")
    return reason if isinstance(reason, str) and _REASON.fullmatch(reason) else ""
