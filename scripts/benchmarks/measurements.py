"""Samples of one run, and what is said of them.

A *measure* is what was timed (`create`), a *subject* who did it (`sandboxd`, `bwrap`), a *scenario*
under which circumstances. Not for: judging (`targets`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

OURS = "sandboxd"


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the samples of one figure, in their unit."""

    p50: float
    p99: float
    count: int

    def to_json(self) -> dict[str, float]:
        return {"p50": round(self.p50, 4), "p99": round(self.p99, 4), "count": self.count}


def p99(values: Sequence[float]) -> float:
    """The smallest sample that at least 99 % of the samples do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 99 // 100) - 1]


def summarize(values: Sequence[float]) -> Summary:
    """Raises ValueError where there is no sample."""
    if not values:
        raise ValueError("no samples")
    return Summary(statistics.median(values), p99(values), len(values))


@dataclass(frozen=True, slots=True)
class Key:
    scenario: str
    measure: str
    subject: str = OURS


@dataclass
class Measurements:
    """Samples by key, each measure in one unit; what failed; what is to be known of a subject."""

    samples: dict[Key, list[float]] = field(default_factory=dict)
    units: dict[tuple[str, str], str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, key: Key, *values: float, unit: str = "ms") -> None:
        """Raises ValueError where the measure has another unit already."""
        known = self.units.setdefault((key.scenario, key.measure), unit)
        if known != unit:
            raise ValueError(f"{key.scenario}/{key.measure} is in {known}, not {unit}")
        self.samples.setdefault(key, []).extend(values)

    @contextlib.contextmanager
    def timed(self, scenario: str, measure: str) -> Iterator[None]:
        """The milliseconds of the block, as a sample of ours; none if it raises."""
        started = time.perf_counter()
        yield
        self.add(Key(scenario, measure), (time.perf_counter() - started) * 1000)

    def fail(self, what: str) -> None:
        """Something that should have succeeded did not: said at the end, and the run has failed."""
        self.failures.append(what)

    def note(self, subject: str, text: str) -> None:
        """What a reader must know to compare a subject with others, or why it is missing."""
        self.notes[subject] = text

    def unit(self, key: Key) -> str:
        return self.units[key.scenario, key.measure]

    def summaries(self) -> dict[Key, Summary]:
        """In the order in which they were first measured."""
        return {key: summarize(values) for key, values in self.samples.items() if values}
