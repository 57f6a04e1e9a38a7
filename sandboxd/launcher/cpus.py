"""Which CPUs a sandbox runs on: as many as its limit, rounded up, the least taken ones.

A quota alone leaves a sandbox's threads on every CPU of the host, and ``nproc`` counts those. The
affinity is set on its PID 1 before anything runs in it, and inherited. It is there for programs
that size themselves by it; what holds a sandbox is the quota: a process may widen its own affinity.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """CPUs that one sandbox was given; to each of them fall ``each`` thousandths of a CPU."""

    cpus: tuple[int, ...]
    each: int


class Cpus:
    """The CPUs of the node, and how much of each is given away."""

    def __init__(self, allowed: Iterable[int]) -> None:
        self._given = dict.fromkeys(sorted(allowed), 0)
        self._last = -1

    @property
    def taken(self) -> bool:
        """Whether a sandbox has any of them."""
        return any(self._given.values())

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(self._given)

    def take(self, cpus: float, within: Iterable[int] = ()) -> Share:
        """For a sandbox with a limit of ``cpus``, of those in ``within`` where it names any."""
        allowed = [cpu for cpu in self._given if cpu in set(within)] or list(self._given)
        count = min(len(allowed), max(1, math.ceil(cpus)))
        # Round the table from the last one taken: equal ones take turns.
        order = sorted(allowed, key=lambda cpu: (self._given[cpu], cpu <= self._last, cpu))
        share = Share(tuple(sorted(order[:count])), round(1000 * min(cpus, count) / count))
        self._last = order[count - 1]
        for cpu in share.cpus:
            self._given[cpu] += share.each
        return share

    def give_back(self, share: Share) -> None:
        for cpu in share.cpus:
            self._given[cpu] -= share.each


def bind(pid: int, cpus: Iterable[int]) -> None:
    """Set the affinity of a process that may be dead by now."""
    with suppress(ProcessLookupError):
        os.sched_setaffinity(pid, cpus)
