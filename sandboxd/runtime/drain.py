"""Emptying a node: nothing new is taken on, what is there goes on, to a deadline if there is one.

Asked for by whoever runs the node, or by itself before the end of the Slurm job it runs in. It is
kept with the launcher, so that a daemon that starts anew goes on with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from sandboxd.errors import NodeDraining, SandboxdError
from sandboxd.runtime.expiry import Expiry
from sandboxd.runtime.sandbox import now

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

log = logging.getLogger(__name__)

RECORD: Final = "drain"
"""Its name among what the launcher keeps."""
RETRY_AFTER_S: Final = 60
"""Of a drain without a deadline: it may last."""
AGAIN_S: Final = 5.0
"""Between two rounds of deletion once the deadline has come."""
JOB_END: Final = "SLURM_JOB_END_TIME"
"""sbatch(1): when the job's time is up, in seconds since the epoch."""
_DEADLINE, _JOB = "deadline", "job"

Why = Literal["asked", "job-end"]


@dataclass(frozen=True, slots=True)
class DrainState:
    """``since`` and ``deadline`` are Unix time: they are shown, and a job's end is given in it."""

    why: Why
    since: float
    deadline: float | None


class Drain:
    """Needs a running event loop."""

    def __init__(
        self, runtime: Runtime, *, empty: Callable[[], Any], environment: Mapping[str, str]
    ) -> None:
        self._runtime = runtime
        self._empty = empty
        """Begins the deletion of all there is."""
        self.state: DrainState | None = None
        self._times = Expiry(self._due)
        self._job_end = _job_end(environment)
        before_s = runtime.config.drain_before_end_s
        if self._job_end is not None and before_s > 0:
            self._times.add(_JOB, self._job_end - before_s - now())

    @property
    def draining(self) -> bool:
        return self.state is not None

    def check(self) -> None:
        """Raises NodeDraining."""
        if self.state is not None:
            raise self.refusal()

    def refusal(self) -> NodeDraining:
        assert self.state is not None
        deadline = self.state.deadline
        left_s = RETRY_AFTER_S if deadline is None else max(1, math.ceil(deadline - now()))
        why = "its job ends" if self.state.why == "job-end" else "it is being emptied"
        return NodeDraining(
            f"the node takes on no more sandboxes: {why}",
            hint="ask another node",
            retry_after_s=min(left_s, RETRY_AFTER_S),
            why=self.state.why,
        )

    async def begin(self, deadline_s: float | None, why: Why = "asked") -> None:
        """Take nothing more on; delete everything in ``deadline_s``. Once more with another
        deadline changes it. Raises NodeUnavailable where it could not be kept; it holds all the
        same until this daemon ends."""
        since = self.state.since if self.state is not None else now()
        deadline = None if deadline_s is None else now() + deadline_s
        if self.state is not None and self.state.why == "job-end":
            # Whoever asks for it once more does not put the end of the job off.
            ends = self.state.deadline
            if deadline is None or (ends is not None and ends < deadline):
                why, deadline = self.state.why, ends
        self._set(DrainState(why, since, deadline))
        self._runtime.admission.room.refuse(self.refusal)
        self._runtime.node_events.tell("drain", "the node takes on no more sandboxes", why=why)
        log.warning("draining (%s), %d sandboxes are there", why, len(self._runtime.table))
        await self.keep()

    async def end(self) -> None:
        """Take sandboxes on again. Raises NodeUnavailable as ``begin`` does."""
        if self.state is not None:
            self._runtime.node_events.tell("undrain", "the node takes sandboxes on again")
            log.warning("draining is over")
        self._set(None)
        self._runtime.admission.room.wake()
        await self.keep()

    async def keep(self) -> None:
        """Have the launcher remember it."""
        record = None
        if self.state is not None:
            record = {
                "why": self.state.why,
                "since": self.state.since,
                "deadline": self.state.deadline,
            }
        await self._runtime.launcher.call("keep", name=RECORD, record=record)

    def adopt(self, record: dict[str, Any] | None) -> bool:
        """Go on with what an earlier daemon began; whether the launcher must be told of ours."""
        if self.state is None and record is not None:
            self._set(DrainState(record["why"], record["since"], record["deadline"]))
        return self.state is not None and record is None

    def _set(self, state: DrainState | None) -> None:
        self.state = state
        if state is not None and state.deadline is not None:
            self._times.add(_DEADLINE, state.deadline - now())

    def _due(self, what: str) -> None:
        if what == _JOB:
            assert self._job_end is not None
            before_s = self._runtime.config.drain_before_end_s
            left_s = max(0.0, self._job_end - before_s / 4 - now())
            self._runtime.spawn(self._before_end(left_s))
            return
        state = self.state
        if state is None or state.deadline is None:
            return
        if state.deadline > now() + 0.01:
            self._times.add(_DEADLINE, state.deadline - now())  # it was put off
            return
        self._empty()
        self._times.add(_DEADLINE, AGAIN_S)

    async def _before_end(self, left_s: float) -> None:
        try:
            await self.begin(left_s, "job-end")
        except SandboxdError as error:
            log.warning("the drain could not be kept: %s", error.message)

    def to_json(self) -> dict[str, Any]:
        state = self.state
        return {
            "draining": state is not None,
            "why": state.why if state else None,
            "since": state.since if state else None,
            "deadline": state.deadline if state else None,
            "job_end": self._job_end,
        }

    def close(self) -> None:
        self._times.close()


def _job_end(environment: Mapping[str, str]) -> float | None:
    """The end of the Slurm job that this process is part of; None if it is in none that ends."""
    text = environment.get(JOB_END, "")
    if not text.isascii() or not text.isdigit():
        return None
    return float(text)
