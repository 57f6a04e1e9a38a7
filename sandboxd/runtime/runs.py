"""Runs: who owns sandboxes, for how long nothing may be heard of them, and how much they may have.

A run need not be set up: a name given with a create is enough, and then it only groups. Set up
(``put``) it can have quotas and a lease. A lease that is not renewed in time ends the run: a
controller that died takes its sandboxes with it.

Ending a run is final for a while (``run_ended_s``): whatever of it is still under way, a create on
its way through the network too, must not bring it back. That is kept with the launcher like all
else that must outlive the daemon; deletions that a daemon did not finish the next one does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sandboxd.errors import (
    NodeUnavailable,
    QuotaExceeded,
    RunEnded,
    RunNotFound,
    SandboxdError,
)
from sandboxd.model import SandboxState
from sandboxd.runtime import lifecycle
from sandboxd.runtime.expiry import Expiry
from sandboxd.runtime.sandbox import Sandbox, now
from sandboxd.runtime.waiting import Shortage

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

log = logging.getLogger(__name__)

PREFIX: Final = "run:"
"""Of a run's name among what the launcher keeps."""
RUNS_MAX: Final = 4096
"""Set up or ended lately."""
BURST_S: Final = 1.0
"""Creates of so long may come at once."""
FINISH_S: Final = 60.0


@dataclass(eq=False, slots=True)
class RunRecord:
    """A run that was set up, or that was ended. Deadlines are on the clock of ``time.monotonic``,
    which outlives a daemon but not a reboot, as the launcher that keeps them does."""

    name: str
    created_at: float
    """Unix time, for showing."""
    lease_s: float | None = None
    deadline: float | None = None
    max_sandboxes: int | None = None
    """None: the configuration's; 0: no quota."""
    max_creates_per_s: float | None = None
    ended_until: float | None = None
    ended_why: str = ""

    def to_record(self) -> dict[str, Any]:
        names = ("created_at", "lease_s", "deadline", "max_sandboxes", "max_creates_per_s")
        return {name: getattr(self, name) for name in (*names, "ended_until", "ended_why")}


@dataclass(eq=False, slots=True)
class _Bucket:
    """Creates that a run may begin at once; filled at its rate, up to ``full``."""

    tokens: float
    at: float

    def fill(self, rate: float) -> bool:
        """Up to now; whether it is full."""
        full, now_ = _full(rate), time.monotonic()
        self.tokens = min(full, self.tokens + (now_ - self.at) * rate)
        self.at = now_
        return self.tokens >= full


def _full(rate: float) -> float:
    return max(1.0, rate * BURST_S)


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment. ``expires_at`` is when its lease runs out, Unix time."""

    name: str
    state: str
    """``active`` or ``ended``."""
    created_at: float | None
    lease_s: float | None
    expires_at: float | None
    max_sandboxes: int
    max_creates_per_s: float
    sandboxes: int
    snapshots: int
    waiting: int


@dataclass(frozen=True, slots=True)
class EndedRun:
    """What became of all that a run had."""

    sandboxes: lifecycle.Deletions
    snapshots: list[str]
    refused: int
    """Creates that were waiting for room."""


class RunTable:
    """The runs of this node. Needs a running event loop."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._table: dict[str, RunRecord] = {}
        self._leases = Expiry(self._due)
        self._ending: set[str] = set()
        self._buckets: dict[str, _Bucket] = {}

    # --- asking ------------------------------------------------------------------------------

    def view(self, name: str) -> RunView:
        """Raises RunNotFound, NodeUnavailable."""
        views = {view.name: view for view in self.views() if view.name == name}
        if name not in views:
            raise RunNotFound(f"no run {name!r} on this node")
        return views[name]

    def counts(self) -> dict[str, int]:
        """Runs that were set up or ended, and those with a lease, for the metrics."""
        ended = sum(self._ended(record) for record in self._table.values())
        leased = sum(record.lease_s is not None for record in self._table.values())
        return {"active": len(self._table) - ended, "ended": ended, "leased": leased}

    def views(self) -> list[RunView]:
        """By name, those too that nobody has set up. Raises NodeUnavailable."""
        sandboxes: dict[str, int] = {}
        for sandbox in self._runtime.sandboxes():
            sandboxes[sandbox.spec.run] = sandboxes.get(sandbox.spec.run, 0) + 1
        snapshots: dict[str, int] = {}
        for record in self._runtime.snapshots:
            snapshots[record.run] = snapshots.get(record.run, 0) + 1
        names = self._table.keys() | sandboxes.keys() | snapshots.keys()
        return [
            self._view(name, sandboxes.get(name, 0), snapshots.get(name, 0))
            for name in sorted(names - {""})
        ]

    def _view(self, name: str, sandboxes: int, snapshots: int) -> RunView:
        record = self._table.get(name)
        deadline = record.deadline if record is not None else None
        return RunView(
            name=name,
            state="ended" if record is not None and self._ended(record) else "active",
            created_at=record.created_at if record is not None else None,
            lease_s=record.lease_s if record is not None else None,
            expires_at=None if deadline is None else now() + deadline - time.monotonic(),
            max_sandboxes=self._max_sandboxes(name),
            max_creates_per_s=self._max_creates_per_s(name),
            sandboxes=sandboxes,
            snapshots=snapshots,
            waiting=self._runtime.admission.room.of_run(name),
        )

    def check_open(self, name: str) -> None:
        """Raises RunEnded."""
        record = self._table.get(name)
        if record is not None and self._ended(record):
            raise self._refusal(record)

    def _ended(self, record: RunRecord) -> bool:
        return record.ended_until is not None and (
            time.monotonic() < record.ended_until or record.name in self._ending
        )

    def _refusal(self, record: RunRecord) -> RunEnded:
        return RunEnded(
            f"run {record.name!r} is over: {record.ended_why}",
            hint="begin a run under another name",
            run=record.name,
            why=record.ended_why,
        )

    # --- quotas ------------------------------------------------------------------------------

    def _max_sandboxes(self, name: str) -> int:
        record = self._table.get(name)
        own = record.max_sandboxes if record is not None else None
        return self._runtime.config.run_max_sandboxes if own is None else own

    def _max_creates_per_s(self, name: str) -> float:
        record = self._table.get(name)
        own = record.max_creates_per_s if record is not None else None
        return self._runtime.config.run_max_creates_per_s if own is None else own

    def shortage(self, name: str, sandboxes: int) -> Shortage | None:
        """Why the run may not have one more beside its ``sandboxes``; None if it may."""
        most = self._max_sandboxes(name)
        if most and sandboxes >= most:
            return Shortage("run-sandboxes", f"the run has its {most} sandboxes", own=True)
        rate = self._max_creates_per_s(name)
        if not rate:
            return None
        tokens = self._bucket(name, rate).tokens
        if tokens >= 1:
            return None
        return Shortage(
            "run-rate",
            f"the run may have {rate:g} creates a second",
            own=True,
            ready_in_s=(1 - tokens) / rate,
        )

    def spend(self, name: str) -> None:
        """A create of the run has been let in."""
        rate = self._max_creates_per_s(name)
        if rate:
            self._bucket(name, rate).tokens -= 1

    def _bucket(self, name: str, rate: float) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket(_full(rate), time.monotonic())
        bucket.fill(rate)
        return bucket

    # --- setting up and renewing -------------------------------------------------------------

    async def put(
        self,
        name: str,
        *,
        lease_s: float | None,
        max_sandboxes: int | None,
        max_creates_per_s: float | None,
    ) -> RunView:
        """Set a run up, or set it up anew; its lease begins now.

        Raises RunEnded, QuotaExceeded, NodeUnavailable.
        """
        self.check_open(name)
        before = self._table.get(name)
        if before is None:
            self._make_room()
        record = RunRecord(
            name,
            now() if before is None else before.created_at,
            lease_s=lease_s,
            max_sandboxes=max_sandboxes,
            max_creates_per_s=max_creates_per_s,
        )
        self._renew(record)
        # Kept before it counts: what is answered outlives this daemon.
        await self._keep(record)
        if self._table.get(name) not in (before, None):
            self.check_open(name)  # ended meanwhile: that stands
        self._table[name] = record
        self._watch(record)
        self._runtime.admission.room.wake()
        return self.view(name)

    async def heartbeat(self, name: str) -> RunView:
        """Its controller lives. Raises RunNotFound, RunEnded, NodeUnavailable."""
        if not self._runtime.ready:
            raise NodeUnavailable("the node does not know its runs yet")
        self.check_open(name)
        record = self._table.get(name)
        if record is None or record.ended_until is not None:
            raise RunNotFound(f"run {name!r} is not set up here", hint="PUT it first")
        self._renew(record)
        await self._keep(record)
        return self.view(name)

    def _renew(self, record: RunRecord) -> None:
        if record.lease_s is not None:
            record.deadline = time.monotonic() + record.lease_s

    def _watch(self, record: RunRecord) -> None:
        if record.deadline is not None:
            self._leases.add(record.name, record.deadline - time.monotonic())

    def _due(self, name: str) -> None:
        record = self._table.get(name)
        if record is None or record.deadline is None or record.ended_until is not None:
            return
        if record.deadline > time.monotonic() + 0.002:
            self._watch(record)  # renewed since
            return
        told = "run %s is ended: nothing was heard of it for %g s"
        log.warning(told, name, record.lease_s, extra={"run": name})
        self._runtime.spawn(self._end_quietly(name, "its lease ran out"))

    async def _end_quietly(self, name: str, why: str) -> None:
        with suppress(SandboxdError):  # housekeeping goes on with it
            await self.end(name, FINISH_S, why)

    # --- ending ------------------------------------------------------------------------------

    async def end(self, name: str, within_s: float, why: str = "it was ended") -> EndedRun:
        """End all of a run: sandboxes (those being made too), snapshots, creates that wait. Answers
        within ``within_s``; what is not done by then goes on by itself. Idempotent, also for a run
        that nobody has heard of: no create of it is let in from now on.

        Raises NodeUnavailable where the node does not know what it has.
        """
        until = asyncio.get_running_loop().time() + within_s
        record = self._mark_ended(name, why)
        refused = self._runtime.admission.room.refuse(lambda: self._refusal(record), name)
        kept = self._runtime.spawn(self._keep(record))
        deletions = await lifecycle.delete_all(self._runtime, self._of(name), _left(until))
        # Behind the sandboxes: one that was still running could take another.
        snapshots = await self._delete_snapshots(name, until)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await asyncio.shield(kept)
        return EndedRun(deletions, snapshots, refused)

    def _mark_ended(self, name: str, why: str) -> RunRecord:
        record = self._table.get(name)
        if record is None:
            self._make_room(forced=True)
            record = self._table[name] = RunRecord(name, now())
        if not self._ended(record):
            record.ended_why = why
        record.deadline = None
        record.ended_until = time.monotonic() + self._runtime.config.run_ended_s
        return record

    def _of(self, name: str) -> list[Sandbox]:
        return [one for one in self._runtime.sandboxes() if one.spec.run == name]

    async def _delete_snapshots(self, name: str, until: float) -> list[str]:
        deleted = []
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                for record in [one for one in self._runtime.snapshots if one.run == name]:
                    with suppress(SandboxdError):  # housekeeping tries again
                        await self._runtime.snapshots.delete(record.id)
                        deleted.append(record.id)
        return deleted

    async def keep_house(self) -> None:
        """Finish what an ending has left, and forget what was ended long ago."""
        for name, bucket in list(self._buckets.items()):
            if bucket.fill(self._max_creates_per_s(name)):
                del self._buckets[name]
        for record in list(self._table.values()):
            if record.ended_until is None:
                continue
            busy = any(one.state is not SandboxState.DELETING for one in self._of(record.name))
            busy = busy or any(one.run == record.name for one in self._runtime.snapshots)
            if busy and record.name not in self._ending:
                self._ending.add(record.name)
                try:
                    until = asyncio.get_running_loop().time() + FINISH_S
                    await lifecycle.delete_all(self._runtime, self._of(record.name), FINISH_S)
                    await self._delete_snapshots(record.name, until)
                finally:
                    self._ending.discard(record.name)
            elif not busy and time.monotonic() > record.ended_until:
                del self._table[record.name]
                await self._forget(record.name)

    # --- what outlives the daemon ------------------------------------------------------------

    def adopt(self, kept: dict[str, dict[str, Any]]) -> Iterator[RunRecord]:
        """Take over what an earlier daemon left; yields what the launcher does not have of ours.

        A lease has half its time at least from here: while there was no daemon nobody could renew.
        """
        for key, row in kept.items():
            name = key.removeprefix(PREFIX)
            if key == name or name in self._table:
                continue
            try:
                record = RunRecord(name, **row)
            except TypeError:
                log.warning("run %s has no record of this version", name)
                continue
            if record.deadline is not None and record.lease_s is not None:
                record.deadline = max(record.deadline, time.monotonic() + record.lease_s / 2)
            self._table[name] = record
            self._watch(record)
        for record in list(self._table.values()):
            if PREFIX + record.name not in kept:
                yield record

    async def keep(self, record: RunRecord) -> None:
        await self._keep(record)

    async def _keep(self, record: RunRecord) -> None:
        await self._runtime.launcher.call(
            "keep", name=PREFIX + record.name, record=record.to_record()
        )

    async def _forget(self, name: str) -> None:
        with suppress(SandboxdError):
            await self._runtime.launcher.call("keep", name=PREFIX + name, record=None)

    def _make_room(self, *, forced: bool = False) -> None:
        """Have room for one more record: the oldest goes that promises nothing. ``forced``: what
        was ended may go too, the longest ended first. Raises QuotaExceeded."""
        if len(self._table) < RUNS_MAX:
            return
        idle = [
            record
            for record in self._table.values()
            if record.lease_s is None
            and (forced or record.ended_until is None)
            and not self._of(record.name)
        ]
        if not idle:
            raise QuotaExceeded(f"the node knows {RUNS_MAX} runs", retry_after_s=60)
        oldest = min(idle, key=lambda record: record.ended_until or record.created_at)
        del self._table[oldest.name]
        self._runtime.spawn(self._forget(oldest.name))

    def close(self) -> None:
        self._leases.close()


def _left(until: float) -> float:
    return max(0.0, until - asyncio.get_running_loop().time())
