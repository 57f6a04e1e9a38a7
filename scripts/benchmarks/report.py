"""A run as JSON, and as tables for a terminal: misses and failures in red."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.machine import busy
from benchmarks.measurements import OURS, Key, Measurements, Summary
from benchmarks.targets import Outcome, Verdict

FORMAT = 1


def document(
    measured: Measurements, verdicts: Iterable[Verdict], machine: Mapping[str, Any], size: str
) -> dict[str, Any]:
    """What `--json` writes. `figures`: scenario, measure, subject."""
    figures: dict[str, Any] = {}
    for key, summary in measured.summaries().items():
        measure = figures.setdefault(key.scenario, {}).setdefault(
            key.measure, {"unit": measured.unit(key), "subjects": {}}
        )
        measure["subjects"][key.subject] = summary.to_json()
    return {
        "format": FORMAT,
        "size": size,
        "machine": dict(machine),
        "figures": figures,
        "targets": [verdict.to_json() for verdict in verdicts],
        "subjects": dict(sorted(measured.notes.items())),
        "failures": measured.failures,
    }


def to_text(node: Mapping[str, Any]) -> str:
    return json.dumps(node, indent=2) + "\n"


def show(
    console: Console,
    measured: Measurements,
    verdicts: list[Verdict],
    machine: dict[str, Any],
) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), style="dim")
    console.print(figures_table(measured, verdicts))
    for subject, note in sorted(measured.notes.items()):
        console.print(f"[bold]{escape(subject)}[/]: {escape(note)}", highlight=False)
    console.print(targets_table(verdicts))
    if warning := busy(machine):
        console.print(f"not to be trusted: {warning}", style="yellow", markup=False)
    for failure in measured.failures:
        console.print(f"failed: {failure}", style="red", markup=False, highlight=False)


def figures_table(measured: Measurements, verdicts: Iterable[Verdict]) -> Table:
    """Subjects of a measure below each other, ours first, in red where it misses its target."""
    missed = {one.target.key for one in verdicts if one.outcome is Outcome.MISSED}
    result = Table(title="What was measured")
    for column in ("scenario", "measure", "who", "p50", "p99", "unit", "samples"):
        result.add_column(
            column, justify="right" if column in ("p50", "p99", "samples") else "left"
        )
    groups: dict[tuple[str, str], list[tuple[Key, Summary]]] = {}
    for key, summary in measured.summaries().items():
        groups.setdefault((key.scenario, key.measure), []).append((key, summary))
    scenario_before = ""
    for (scenario, measure), rows in groups.items():
        rows.sort(key=lambda row: row[0].subject != OURS)
        for number, (key, summary) in enumerate(rows):
            shown = scenario if number == 0 and scenario != scenario_before else ""
            result.add_row(
                shown,
                measure if number == 0 else "",
                key.subject,
                number_text(summary.p50),
                number_text(summary.p99),
                measured.unit(key),
                str(summary.count),
                style="red" if key in missed else None if key.subject == OURS else "dim",
            )
        scenario_before = scenario
    return result


def targets_table(verdicts: Iterable[Verdict]) -> Table:
    result = Table(title="Must reach")
    for column in ("scenario", "measure", "", "wanted", "bound", "is", ""):
        result.add_column(column, justify="right" if column in ("bound", "is") else "left")
    styles = {Outcome.REACHED: "green", Outcome.MISSED: "red", Outcome.NOT_MEASURED: "dim"}
    for one in verdicts:
        key = one.target.key
        result.add_row(
            key.scenario,
            key.measure,
            one.target.statistic,
            one.target.wanted,
            "" if one.bound is None else number_text(one.bound),
            "" if one.value is None else number_text(one.value),
            one.outcome.value,
            style=styles[one.outcome],
        )
    return result


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
