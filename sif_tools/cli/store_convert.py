"""`sif-tools convert` into a store: one image, or a whole list with a live table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sif_tools.batch.jobs import Journal, default_name, read_list
from sif_tools.batch.run import BatchReport, Show, Standing, run_batch
from sif_tools.batch.workers import WorkOptions
from sif_tools.cli.output import human_bytes, print_json, safe_text
from sif_tools.convert import ConvertOptions
from sif_tools.sources.open import open_source
from sif_tools.store.build import diff_ids
from sif_tools.store.keeper import Keeper, KeepOptions, make_store
from sif_tools.store.plan import Chain, Planner
from sif_tools.store.records import Layers

# Without a terminal: a line so often.
_LINE_EVERY_S: Final = 10.0
_FAILURES_SHOWN: Final = 20


def convert_to_store(
    reference: str,
    store: Path,
    name: str | None,
    layers: Layers,
    options: ConvertOptions,
    *,
    as_json: bool,
) -> None:
    """One image; what it shares with those in the store already is used."""
    name = name or default_name(reference)
    keeper = Keeper(make_store(store), KeepOptions(options.squashfs, layers))
    started_at = time.monotonic()
    with open_source(reference, options.architecture, options.source) as source:
        chain = Chain(tuple(diff_ids(source)), tuple(one.size_bytes for one in source.layers))
        cuts = (
            Planner([chain], keeper.is_stored(source.architecture)).cuts(chain)
            if chain.layers
            else ()
        )
        kept = keeper.keep(source, cuts, name)
    seconds = time.monotonic() - started_at
    if as_json:
        node = {"name": name, "key": kept.key, "written_bytes": kept.written_bytes}
        print_json(node | kept.record.node() | {"seconds": round(seconds, 3)})
        return
    print(
        f"{safe_text(name)}: {len(kept.record.sifs)} SIFs of {human_bytes(kept.size_bytes)}, "
        f"{human_bytes(kept.written_bytes)} of it new, {seconds:.1f} s"
    )


def convert_batch(
    batch: Path,
    store: Path,
    layers: Layers,
    options: ConvertOptions,
    *,
    workers: int,
    journal_path: Path | None,
    report_path: Path | None,
    as_json: bool,
) -> bool:
    """A list of images; whether all of them are in the store now."""
    jobs = read_list(batch)
    layout = make_store(store)
    work = WorkOptions(
        layout.root,
        KeepOptions(options.squashfs, layers),
        options.source,
        options.architecture,
    )
    path = journal_path or batch.with_name(batch.name + ".journal")
    with Journal(path) as journal, _shown() as show:
        report = run_batch(jobs, journal, work, workers, show)
    if report_path is not None:
        report_path.write_text(json.dumps(report.node(), indent=2) + "\n")
    if as_json:
        print_json(report.node())
    else:
        _print_report(report)
    return not report.failures


def _print_report(report: BatchReport) -> None:
    one = report.standing
    print(
        f"{one.done} of {one.total} images are in the store ({one.found} were there before), "
        f"{one.failed} failed; {human_bytes(one.written_bytes)} written in {one.seconds:.1f} s"
    )
    for failure in report.failures[:_FAILURES_SHOWN]:
        print(f"failed: {safe_text(failure['name'])}: {safe_text(failure['message'])}")
    if len(report.failures) > _FAILURES_SHOWN:
        print(f"and {len(report.failures) - _FAILURES_SHOWN} more; --report lists them all")


@contextmanager
def _shown() -> Iterator[Show]:
    """A table that stays in its place on a terminal; elsewhere a line now and then, on stderr."""
    if sys.stderr.isatty():
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            yield _every(0.2, lambda one: live.update(standing_table(one), refresh=True))
    else:
        yield _every(_LINE_EVERY_S, _print_line)


def _every(seconds: float, show: Show) -> Show:
    told_at = time.monotonic() if seconds > 1 else 0.0

    def tell(one: Standing) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= seconds:
            told_at = time.monotonic()
            show(one)

    return tell


def standing_table(one: Standing) -> Table:
    """What a person wants to see of a batch that runs."""
    table = Table(title=one.stage, show_header=True, box=None, padding=(0, 2))
    for column in ("done", "failed", "of", "rate", "written", "from", "time", "left"):
        table.add_column(column, justify="right")
    table.add_row(
        str(one.done),
        str(one.failed),
        str(one.total),
        f"{one.rate:.1f}/s",
        human_bytes(one.written_bytes),
        human_bytes(one.source_bytes),
        _clock(one.seconds),
        "?" if one.left_s is None else _clock(one.left_s),
    )
    return table


def _print_line(one: Standing) -> None:
    left = "" if one.left_s is None else f", {_clock(one.left_s)} left"
    print(
        f"{one.stage}: {one.done} done, {one.failed} failed of {one.total}, "
        f"{one.rate:.1f}/s, {human_bytes(one.written_bytes)} written{left}",
        file=sys.stderr,
        flush=True,
    )


def _clock(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
