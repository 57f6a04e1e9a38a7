"""Whether the machine is so hard-pressed that nothing more is to be put on it.

Closed at a threshold, open again well below it, so that it does not flutter: PSI must fall to
REOPEN of what closed it, free memory must rise by as much above the reserve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from sandboxd.config import Config
from sandboxd.linux import cgroup, pressure
from sandboxd.linux.pressure import Stall

log = logging.getLogger(__name__)

SAMPLE_S: Final = 0.5
REOPEN: Final = 0.7
SHORT: Final = 4
"""Memory stalls count where less than so many times the reserve is available."""
RETRY_AFTER_S: Final = 10
"""What the averages are taken over."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The machine at one moment."""

    available_mb: int
    stalls: dict[str, Stall]


class Sampler:
    """Reads the machine. Where the process stands in the cgroups is looked up once: on a host with
    thousands of mounts that costs more than all the rest."""

    def __init__(self) -> None:
        self._layout = cgroup.layout()

    def __call__(self) -> Sample:
        _, available_mb = pressure.memory_mb()
        bound = pressure.cgroup_memory_mb(self._layout)
        if bound is not None:
            available_mb = min(available_mb, bound[1])
        return Sample(available_mb, pressure.stalls())


class Pressure:
    """Looks every SAMPLE_S. ``on_open`` is called when it opens again. Needs a running loop."""

    def __init__(
        self,
        config: Config,
        on_open: Callable[[], None],
        read: Callable[[], Sample] | None = None,
    ) -> None:
        self.config = config
        self._on_open = on_open
        self._read = read or Sampler()
        self._loop = asyncio.get_running_loop()
        self.last = self._read()
        self.closed_by: tuple[str, ...] = self._too_high(1.0)
        self._timer = self._loop.call_later(SAMPLE_S, self._look)

    def _look(self) -> None:
        self._timer = self._loop.call_later(SAMPLE_S, self._look)
        self.last = self._read()
        before = self.closed_by
        # What has closed it stays a reason until it is well below; another closes at the threshold.
        low = self._too_high(REOPEN)
        self.closed_by = tuple(name for name in low if name in before or name in self._too_high(1))
        if self.closed_by and not before:
            log.warning("nothing more is taken on: %s", ", ".join(self.closed_by))
        if before and not self.closed_by:
            log.warning("the pressure has gone; sandboxes are taken on again")
            self._on_open()

    def _too_high(self, factor: float) -> tuple[str, ...]:
        """What is beyond its threshold times ``factor`` (below 1: what is not yet well again)."""
        config, found = self.config, []
        if self.last.available_mb < config.memory_reserve_mb / factor:
            found.append("memory-low")
        # A process that computes waits for a CPU on any busy node: "full" would be the whole story,
        # and for CPUs there is none; of memory and I/O "some" is daily bread.
        for kind, figure, most in (
            ("memory", "full", config.pressure_memory_percent),
            ("io", "full", config.pressure_io_percent),
            ("cpu", "some", config.pressure_cpu_percent),
        ):
            stall = self.last.stalls.get(kind)
            # A sandbox at its own memory limit stalls with gigabytes free: no word of the node, and
            # one hostile sandbox could close it by that.
            if kind == "memory" and self.last.available_mb > SHORT * config.memory_reserve_mb:
                continue
            if stall is not None and most < 100 and getattr(stall, figure) > most * factor:
                found.append(f"{kind}-pressure")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "closed_by": list(self.closed_by),
            "available_mb": self.last.available_mb,
            "stalls": {kind: asdict(stall) for kind, stall in self.last.stalls.items()},
        }

    def close(self) -> None:
        self._timer.cancel()
