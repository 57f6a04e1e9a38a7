"""What a sandbox was given: what its views tell of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scope:
    """What a sandbox was given."""

    cpus: tuple[int, ...]
    memory_kb: int
    disk_kb: int
    started_s: float
    """CLOCK_BOOTTIME."""
    started_at: float
    """Unix time of the same moment."""
    quota_us: int = 0
    """Run time in each 100 ms."""
    cpu_weight: int = 100
    pids: int = 0
