"""PNG files, one a scenario: medians as bars with a line to p99, targets as marks.

matplotlib is only imported here: a run without `--out` needs none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.measurements import OURS, Key, Measurements, Summary
from benchmarks.targets import Outcome, Verdict

OURS_COLOUR, MISSED_COLOUR, OTHER_COLOUR, TARGET_COLOUR = "#2563ab", "#c0392b", "#9aa5b1", "#1e8449"


def draw(measured: Measurements, verdicts: Iterable[Verdict], folder: Path) -> list[Path]:
    """Raises OSError. A measure is a row of panels, since measures differ in unit and size."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    verdicts = list(verdicts)
    scenarios: dict[str, dict[str, list[tuple[Key, Summary]]]] = {}
    for key, summary in measured.summaries().items():
        scenarios.setdefault(key.scenario, {}).setdefault(key.measure, []).append((key, summary))
    written = []
    for scenario, measures in scenarios.items():
        rows = [len(subjects) for subjects in measures.values()]
        figure, axes = pyplot.subplots(
            len(measures),
            1,
            figsize=(8, 1.0 * len(measures) + 0.32 * sum(rows)),
            squeeze=False,
            gridspec_kw={"height_ratios": [count + 1 for count in rows]},
            layout="constrained",
        )
        for panel, (measure, subjects) in zip(axes[:, 0], measures.items(), strict=True):
            bars(panel, measure, subjects, measured, verdicts)
        figure.suptitle(scenario)
        path = folder / f"{file_name(scenario)}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def bars(
    panel: object,
    measure: str,
    subjects: list[tuple[Key, Summary]],
    measured: Measurements,
    verdicts: list[Verdict],
) -> None:
    from matplotlib.axes import Axes  # noqa: PLC0415

    assert isinstance(panel, Axes)
    # From bottom to top: ours comes first.
    ordered = sorted(subjects, key=lambda row: row[0].subject == OURS)
    own = [one for one in verdicts if one.target.key == Key(subjects[0][0].scenario, measure)]
    missed = any(one.outcome is Outcome.MISSED for one in own)
    names = [key.subject for key, _ in ordered]
    medians = [summary.p50 for _, summary in ordered]
    colours = [
        OTHER_COLOUR if name != OURS else MISSED_COLOUR if missed else OURS_COLOUR for name in names
    ]
    panel.barh(names, medians, color=colours)
    for row, (_, summary) in enumerate(ordered):
        low, high = sorted((summary.p50, summary.p99))
        panel.plot([low, high], [row, row], color="black", linewidth=1)
        panel.text(high, row, f" {summary.p50:.3g}", va="center", fontsize=8)
    for one in own:
        if one.bound is not None and one.target.statistic == "p50":
            panel.axvline(one.bound, color=TARGET_COLOUR, linestyle="--", linewidth=1)
    unit = measured.unit(ordered[0][0])
    panel.set_title(f"{measure} ({unit})" if unit else measure, fontsize=9, loc="left")
    panel.tick_params(labelsize=8)
    panel.margins(x=0.12)


def file_name(scenario: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", scenario.lower()).strip("-")
