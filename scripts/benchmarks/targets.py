"""What must be reached, on two cores with every wall on, through HTTP from the Python client.

One table; a target is a bound on one figure of ours: a number, or a multiple of another figure of
the same run. Not reached is said, and never bent: a figure that was not measured is not reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.measurements import Key, Summary


class Outcome(StrEnum):
    REACHED = "reached"
    MISSED = "missed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Target:
    """`statistic` of the figure `key` must be at most `most` (or at least `least`), and at most
    `times` the median of `other`. Each bound that is None is no bound."""

    key: Key
    statistic: str = "p50"
    most: float | None = None
    least: float | None = None
    other: Key | None = None
    times: float = 1.0

    @property
    def wanted(self) -> str:
        bounds = []
        if self.most is not None:
            bounds.append(f"≤ {self.most:g}")
        if self.least is not None:
            bounds.append(f"≥ {self.least:g}")
        if self.other is not None:
            other = self.other
            where = "" if other.scenario == self.key.scenario else f"{other.scenario} "
            factor = "" if self.times == 1 else f"{self.times:g} times "
            bounds.append(f"≤ {factor}{where}{other.measure} of {other.subject}")
        return ", ".join(bounds)


@dataclass(frozen=True, slots=True)
class Verdict:
    target: Target
    outcome: Outcome
    value: float | None = None
    bound: float | None = None
    """The number that the value had to keep to: of several, the one that is hardest."""

    def to_json(self) -> dict[str, Any]:
        key = self.target.key
        return {
            "scenario": key.scenario,
            "measure": key.measure,
            "statistic": self.target.statistic,
            "wanted": self.target.wanted,
            "bound": None if self.bound is None else round(self.bound, 4),
            "value": None if self.value is None else round(self.value, 4),
            "outcome": self.outcome.value,
        }


def judge(target: Target, figures: Mapping[Key, Summary]) -> Verdict:
    """A bound by a figure that was not measured leaves the target unmeasured, unless the value
    misses another of its bounds anyway."""
    found = figures.get(target.key)
    if found is None:
        return Verdict(target, Outcome.NOT_MEASURED)
    value = float(getattr(found, target.statistic))
    if target.least is not None and value < target.least:
        return Verdict(target, Outcome.MISSED, value, target.least)
    bounds = [] if target.most is None else [target.most]
    unknown = False
    if target.other is not None:
        other = figures.get(target.other)
        unknown = other is None
        if other is not None:
            bounds.append(other.p50 * target.times)
    bound = min(bounds) if bounds else target.least
    if bounds and value > min(bounds):
        return Verdict(target, Outcome.MISSED, value, bound)
    return Verdict(target, Outcome.NOT_MEASURED if unknown else Outcome.REACHED, value, bound)


def judge_all(targets: Iterable[Target], figures: Mapping[Key, Summary]) -> list[Verdict]:
    return [judge(target, figures) for target in targets]


_ONE = "lifecycle, 1 client"
_MANY = "lifecycle, 64 clients"
_EXEC = "exec, 1 client"
_STATES = ("clean", "10,000 files", "500 MB")


def _at_most(scenario: str, measure: str, p50: float, p99: float | None = None) -> list[Target]:
    key = Key(scenario, measure)
    targets = [Target(key, most=p50)]
    if p99 is not None:
        targets.append(Target(key, "p99", most=p99))
    return targets


MUST_REACH: tuple[Target, ...] = (
    *_at_most(_ONE, "create", 2.0, 10.0),
    Target(
        Key("create without a slot", "create"),
        other=Key("create without a slot", "create", "floor_sandbox"),
        times=2.0,
    ),
    Target(Key(_EXEC, "exec"), most=1.8, other=Key(_EXEC, "exec", "floor_spawn"), times=2.0),
    Target(Key(_EXEC, "exec"), "p99", most=6.0),
    *_at_most(_ONE, "delete", 1.5),
    Target(Key(_ONE, "together"), other=Key(_ONE, "together", "bwrap")),
    Target(Key(_ONE, "together"), other=Key(_ONE, "together", "crun, no limits")),
    *(one for state in _STATES for one in _at_most(f"files: {state}", "reset", 2.0, 10.0)),
    *(
        one
        for state in _STATES
        for measure, most in (("snapshot", 3.0), ("rollback", 2.0), ("fork", 3.0))
        for one in _at_most(f"files: {state}", measure, most)
    ),
    *_at_most("snapshot by copy, 10 MB in 1,000 files", "total", 40.0),
    *_at_most("snapshot by copy, 10 MB in 1,000 files", "frozen", 40.0),
    *_at_most("100 forks of one snapshot", "all", 400.0),
    Target(Key(_MANY, "rate"), least=250.0),
    Target(Key(_MANY, "errors"), most=0),
    Target(Key("burst of 1,000 creates", "all"), most=5.0),
    Target(Key("burst of 1,000 creates", "errors"), most=0),
    Target(Key("1,000 live", "memory"), most=0.75),
    Target(Key("1,000 live", "create"), other=Key("10 live", "create"), times=2.0),
)
"""p50 and p99 of what takes milliseconds; a rate is lifecycles a second, the burst in seconds,
memory in MiB a sandbox."""
