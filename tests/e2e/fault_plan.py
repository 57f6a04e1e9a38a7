"""What a fault run does, drawn from its seed alone: each worker's actions and each round's fault.

Nothing here depends on an answer or on a clock, so a seed gives the same actions and faults every
time. Faults are dealt like cards: each occurs once before one occurs again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WORKERS = 3
PLACES = 2
"""Sandboxes of one worker; what is to happen in one that is not there makes it first."""
ACTIONS = 7
"""Of each worker in a round."""
PAUSE_S = (0.2, 1.2)
"""For which something is stopped or away: well below what any watch takes for dead."""
VERBS = (
    *("execute", "upload", "download", "command", "read_image", "write") * 2,
    *("signalled", "time_out", "start", "snapshot", "roll_back", "fork", "reset", "delete"),
    *("fill", "halt"),
)


@dataclass(frozen=True)
class Action:
    """`number` decides whatever else an action needs decided."""

    verb: str
    place: int
    number: int


@dataclass(frozen=True)
class Round:
    number: int
    fault: str
    after: int
    """How many actions of the round, of all workers, come before the fault."""
    pause_s: float
    actions: tuple[tuple[Action, ...], ...]
    """By worker."""

    def __str__(self) -> str:
        return f"round {self.number}: {self.fault} after {self.after} actions, {self.pause_s:.2f} s"


def rounds(seed: int, faults: Sequence[str]) -> Iterator[Round]:
    """Without end."""
    rng = random.Random(seed)
    number = 0
    while True:
        for fault in rng.sample(faults, len(faults)):
            number += 1
            after = rng.randrange(2, WORKERS * ACTIONS // 2)
            actions = tuple(tuple(_action(rng) for _ in range(ACTIONS)) for _ in range(WORKERS))
            yield Round(number, fault, after, rng.uniform(*PAUSE_S), actions)


def _action(rng: random.Random) -> Action:
    return Action(rng.choice(VERBS), rng.randrange(PLACES), rng.randrange(1 << 30))
