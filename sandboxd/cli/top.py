"""``sandboxd top``: what the sandboxes use, again and again."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from sandboxd.cli import options
from sandboxd.cli.output import age, mebibytes, print_json, print_table, reporting
from sandboxd.client import calls
from sandboxd.client.results import SandboxInfo, Stats
from sandboxd.client.sync import Client
from sandboxd.errors import SandboxdError

COLUMNS = [
    *("ID", "STATE", "CPU%", "THROTTLED%", "MEMORY", "PEAK", "DISK", "READ/S", "WRITE/S"),
    *("PIDS", "OOM", "AGE", "RUN"),
]


class Sort(StrEnum):
    """What the table is in the order of, the most first."""

    CPU = "cpu"
    MEMORY = "memory"
    DISK = "disk"
    IO = "io"
    PIDS = "pids"
    AGE = "age"


@dataclass(frozen=True, slots=True)
class Sample:
    """One sandbox at one moment."""

    info: SandboxInfo
    stats: Stats


def top(
    *,
    run: options.RunName = None,
    label: options.Label = None,
    sort: Annotated[Sort, typer.Option(help="The most of this first.")] = Sort.CPU,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Show what the sandboxes use, the busiest first, until interrupted. CPU, throttling and I/O
    are what they were between two looks, all else is as it is."""
    console = Console(highlight=False)
    with reporting(), options.daemon(url, token_file, config) as daemon:

        def look() -> dict[str, Sample]:
            return sample(daemon, run, options.labels(label))

        before = look()
        if as_json:
            print_json({"sandboxes": list(before.values())})
            return
        if once or not console.is_terminal:
            time.sleep(every)
            print_table(COLUMNS, rows(before, look(), sort))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                now = look()
                live.update(_table(rows(before, now, sort), console.height), refresh=True)
                before = now


def sample(daemon: Client, run: str | None, labels: dict[str, str | None]) -> dict[str, Sample]:
    """By id. One that went while it was asked about is left out."""
    found = {}
    for info in daemon.list(run=run, labels=labels):
        try:
            found[info.id] = Sample(info, daemon.do(calls.stats(info.id)))
        except SandboxdError:
            continue
    return found


def rows(
    before: dict[str, Sample], now: dict[str, Sample], sort: Sort = Sort.CPU
) -> list[list[str]]:
    """A table's rows, those with the most of ``sort`` first; rates are since ``before``."""
    table = []
    for key, one in now.items():
        rates = _rates(before[key].stats if key in before else None, one.stats)
        table.append((_weight(one, rates, sort), key, _row(one, rates)))
    return [row for _, _, row in sorted(table, key=lambda entry: (-entry[0], entry[1]))]


def _rates(before: Stats | None, now: Stats) -> dict[str, float | None]:
    names = ("cpu_usage_s", "cpu_throttled_s", "io_read_bytes", "io_written_bytes")
    return {name: _rate(before, now, name) for name in names}


def _weight(one: Sample, rates: dict[str, float | None], sort: Sort) -> float:
    """What is not known weighs nothing."""
    stats = one.stats
    match sort:
        case Sort.CPU:
            return rates["cpu_usage_s"] or 0.0
        case Sort.MEMORY:
            return stats.memory_used_bytes or 0
        case Sort.DISK:
            return stats.disk_used_bytes or 0
        case Sort.IO:
            return (rates["io_read_bytes"] or 0.0) + (rates["io_written_bytes"] or 0.0)
        case Sort.PIDS:
            return stats.pids_count or 0
        case Sort.AGE:
            return -one.info.created_at.timestamp()


def _row(one: Sample, rates: dict[str, float | None]) -> list[str]:
    stats = one.stats
    cpu, throttled = rates["cpu_usage_s"], rates["cpu_throttled_s"]
    return [
        one.info.id,
        one.info.state,
        _percent(cpu),
        _percent(throttled),
        mebibytes(stats.memory_used_bytes),
        mebibytes(stats.memory_peak_bytes),
        mebibytes(stats.disk_used_bytes),
        mebibytes(rates["io_read_bytes"]),
        mebibytes(rates["io_written_bytes"]),
        _number(stats.pids_count),
        _number(stats.memory_oom_kills),
        age(one.info.created_at, datetime.datetime.now(datetime.UTC)),
        one.info.run or "-",
    ]


def _rate(before: Stats | None, now: Stats, name: str) -> float | None:
    """A second, between two samples: of seconds or of bytes."""
    if before is None or getattr(before, name) is None or getattr(now, name) is None:
        return None
    between_s = (now.at - before.at).total_seconds()
    spent: Any = getattr(now, name) - getattr(before, name)
    return spent / between_s if between_s > 0 else None


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.0f}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _table(lines: list[list[str]], height: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for row in lines[: height - 2]:
        table.add_row(*row)
    return table
