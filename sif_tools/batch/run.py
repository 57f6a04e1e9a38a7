"""A batch, from its list to its report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sif_tools.batch.jobs import Job, Journal
from sif_tools.batch.workers import Outcome, Task, Workers, WorkOptions
from sif_tools.format import machine_arch
from sif_tools.store import lookup
from sif_tools.store.keeper import Keeper
from sif_tools.store.layout import open_store
from sif_tools.store.plan import Chain, Cuts, Planner


@dataclass(slots=True)
class Standing:
    """How far a batch is. Bytes: `written` to the store, `source` of the images that are done."""

    total: int
    stage: str = "looking at images"
    looked_at: int = 0
    done: int = 0
    found: int = 0
    failed: int = 0
    written_bytes: int = 0
    source_bytes: int = 0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def rate(self) -> float:
        """Images a second, done or failed."""
        return (self.done + self.failed) / max(self.seconds, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds to go at the rate of those that were converted; None while that is unknown."""
        converted = self.done - self.found
        left = self.total - self.done - self.failed
        if left == 0:
            return 0.0
        return left * self.seconds / converted if converted > 0 else None


@dataclass(slots=True)
class BatchReport:
    standing: Standing
    failures: list[dict[str, Any]] = field(default_factory=list)

    def node(self) -> dict[str, Any]:
        """The report as JSON has it."""
        one = self.standing
        return {
            "images": one.total,
            "done": one.done,
            "found": one.found,
            "converted": one.done - one.found,
            "failed": one.failed,
            "seconds": round(one.seconds, 3),
            "written_bytes": one.written_bytes,
            "source_bytes": one.source_bytes,
            "failures": self.failures,
        }


Show = Callable[[Standing], None]
# code, message, hint
Error = tuple[str, str, str | None]


def run_batch(
    jobs: list[Job], journal: Journal, options: WorkOptions, workers: int, show: Show
) -> BatchReport:
    """Keep every image of `jobs`; failures are reported and stop nothing."""
    batch = _Batch(jobs, journal, show)
    batch.skip_done(options)
    with Workers(options, workers) as pool:
        chains = batch.look(pool)
        keeper = Keeper(open_store(options.store), options.keep)
        architecture = options.architecture or machine_arch(platform.machine())
        planner = Planner(
            [chain for chain in chains.values() if chain.layers],
            keeper.is_stored(architecture.partition("/")[0]),
        )
        cuts = {
            number: planner.cuts(chain) if chain.layers else () for number, chain in chains.items()
        }
        broken = batch.build_shared(pool, chains, cuts)
        batch.build(pool, {number: cuts[number] for number in cuts if number not in broken})
    return batch.report


class _Batch:
    def __init__(self, jobs: list[Job], journal: Journal, show: Show) -> None:
        self._jobs = jobs
        self._journal = journal
        self._show = show
        self._skipped: set[int] = set()
        self.report = BatchReport(Standing(len(jobs)))

    def skip_done(self, options: WorkOptions) -> None:
        """What the journal has as done, and the store still has, needs no look at its source."""
        layout = open_store(options.store)
        for number, job in enumerate(self._jobs):
            node = self._journal.done.get(job)
            if node is None:
                continue
            # A name may have been given to another image since, by a newer list.
            name = lookup.name_record(layout, job.name)
            record = None if name is None else lookup.image_record(layout, name.image)
            if (
                name is not None
                and name.image == node.get("image")
                and record is not None
                and lookup.is_complete(layout, record)
            ):
                self._skipped.add(number)
                self._count_found(record.source_bytes)

    def look(self, pool: Workers) -> dict[int, Chain]:
        """Resolve the rest; those that are not in the store, with their layers."""
        chains: dict[int, Chain] = {}
        tasks = [
            Task(number, job.source, job.name)
            for number, job in enumerate(self._jobs)
            if number not in self._skipped
        ]
        for outcome in pool.run(tasks):
            self.report.standing.looked_at += 1
            if outcome.error is not None:
                self._failed(outcome.number, outcome.error)
            elif outcome.chain is not None:
                chains[outcome.number] = outcome.chain
            else:
                self._journal_done(outcome)
                self._count_found(outcome.source_bytes)
            self._show(self.report.standing)
        return chains

    def build_shared(
        self, pool: Workers, chains: dict[int, Chain], cuts: dict[int, Cuts]
    ) -> set[int]:
        """Bases first, then what lies on them, each by one of its images: or all that want the
        same one would wait for each other. Returns the images that fail with one of them."""
        broken: dict[tuple[str, ...], Error] = {}
        for level, stage in enumerate(("building bases", "building shared layers")):
            self.report.standing.stage = stage
            wanted: dict[tuple[tuple[str, ...], Cuts], int] = {}
            for number, where in cuts.items():
                if len(where) > level:
                    layers = chains[number].layers[: where[level]]
                    if not any(layers[:below] in broken for below in where[:level]):
                        wanted.setdefault((layers, where[: level + 1]), number)
            tasks = [
                Task(number, self._jobs[number].source, None, where, only_shared=True)
                for (_, where), number in wanted.items()
            ]
            # One image may be the first to want a base and a shared part, but not on one level.
            layers_of = {number: layers for (layers, _), number in wanted.items()}
            for outcome in pool.run(tasks):
                if outcome.error is not None:
                    broken[layers_of[outcome.number]] = outcome.error
                else:
                    self.report.standing.written_bytes += outcome.written_bytes
                self._show(self.report.standing)
        failed: set[int] = set()
        for number, where in cuts.items():
            for above in where:
                error = broken.get(chains[number].layers[:above])
                if error is not None and number not in failed:
                    failed.add(number)
                    self._failed(number, error)
        return failed

    def build(self, pool: Workers, cuts: dict[int, Cuts]) -> None:
        """Convert the rest."""
        self.report.standing.stage = "converting"
        tasks = [
            Task(number, self._jobs[number].source, self._jobs[number].name, where)
            for number, where in cuts.items()
        ]
        for outcome in pool.run(tasks):
            if outcome.error is not None:
                self._failed(outcome.number, outcome.error)
            else:
                self._journal_done(outcome)
                self.report.standing.done += 1
                self.report.standing.written_bytes += outcome.written_bytes
                self.report.standing.source_bytes += outcome.source_bytes
            self._show(self.report.standing)

    def _count_found(self, source_bytes: int) -> None:
        self.report.standing.done += 1
        self.report.standing.found += 1
        self.report.standing.source_bytes += source_bytes

    def _journal_done(self, outcome: Outcome) -> None:
        self._journal.add(
            self._jobs[outcome.number],
            state="done",
            image=outcome.key,
            manifest_digest=outcome.manifest_digest,
            size_bytes=outcome.size_bytes,
            written_bytes=outcome.written_bytes,
        )

    def _failed(self, number: int, error: Error) -> None:
        job = self._jobs[number]
        code, message, hint = error
        self.report.standing.failed += 1
        self._journal.add(job, state="failed", code=code, message=message)
        self.report.failures.append(
            {
                "source": job.source,
                "name": job.name,
                "code": code,
                "message": message,
                "hint": hint,
            }
        )
