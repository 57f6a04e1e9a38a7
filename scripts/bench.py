"""Measures create, exec and delete at the HTTP API, beside two C floors taken in the same run.

For: seeing what sandboxd adds to what the kernel takes. Requests go over one keep-alive connection,
each sample is followed by its floor's, so that a slower minute of the machine hits both. Not for:
load with many clients.

    create   POST /v1/sandboxes until the answer    floor_sandbox: clone, place, mount, exec
    exec     POST .../exec of /bin/true             floor_spawn: spawn + wait, inherited filter
    delete   DELETE until the answer
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_floors import FloorError, Floors, cgroup_hierarchies, floors
from local_daemon import DaemonError, LocalDaemon, local_daemon, signals_as_interrupt
from quickstart import default_layout
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAM = "/bin/true"
EXECS_PER_SANDBOX = 3
WARM_UP_ROUNDS = 5
ROUNDS, QUICK_ROUNDS = 300, 50
# What a figure is compared with, and the factor it should stay below.
FLOOR_OF = {"create_ms": ("floor_sandbox_ms", 2.0), "exec_ms": ("floor_spawn_ms", 2.0)}
FIGURES = ("create_ms", "exec_ms", "delete_ms", "floor_sandbox_ms", "floor_spawn_ms")


@dataclass
class Samples:
    """Milliseconds by figure, and what went wrong on the way."""

    by_figure: dict[str, list[float]] = field(
        default_factory=lambda: {figure: [] for figure in FIGURES}
    )
    failures: list[str] = field(default_factory=list)

    def timed(self, figure: str, action: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = action()
        self.by_figure[figure].append((time.perf_counter() - started) * 1000)
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        return {
            figure: {"p50": round(statistics.median(values), 3), "p99": round(p99(values), 3)}
            for figure, values in self.by_figure.items()
            if values
        }


def p99(values: list[float]) -> float:
    """The smallest sample that at least 99 % of the samples do not exceed."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 99 // 100) - 1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} sandboxes, a minute")
    parser.add_argument("--rounds", type=int, help=f"sandboxes to make (default: {ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--image", type=Path, metavar="SIF", help="default: the task image")
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    console = Console()
    try:
        with signals_as_interrupt():
            samples = measure(rounds, options.image)
    except KeyboardInterrupt:
        return 130
    except (DaemonError, FloorError, subprocess.CalledProcessError) as error:
        console.print(f"bench: {error}", style="red", markup=False, highlight=False)
        return 1
    figures = samples.summary()
    if options.json:
        document = {**figures, "machine": machine()}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    console.print(table(figures))
    for failure in samples.failures:
        console.print(f"failed: {failure}", style="red", markup=False, highlight=False)
    return 1 if samples.failures or len(figures) < len(FIGURES) else 0


def measure(rounds: int, image: Path | None) -> Samples:
    with local_daemon("bench") as daemon, contextlib.ExitStack() as stack:
        sif = daemon.images_dir / "bench.sif"
        if image is None:
            layout = default_layout()
            subprocess.run([REPOSITORY / "scripts/make-task-image", layout], check=True)
            convert = Path(sys.executable).with_name("sif-tools")
            subprocess.run([convert, "convert", f"oci:{layout}", sif], check=True)
        else:
            sif.write_bytes(image.read_bytes())
        sif.chmod(0o444)
        scratch = daemon.home / "floors"
        scratch.mkdir()
        floor = stack.enter_context(floors(sif, scratch, PROGRAM))
        daemon.start()
        for _ in range(WARM_UP_ROUNDS):
            one_round(daemon, floor, Samples())
        samples = Samples()
        for number in range(rounds):
            show_progress(number, rounds)
            one_round(daemon, floor, samples)
        show_progress(rounds, rounds)
        return samples


def one_round(daemon: LocalDaemon, floor: Floors, samples: Samples) -> None:
    """One sandbox's life, each step beside its floor. A failure is noted and ends the round."""
    floor_sandbox, floor_spawn = (samples.by_figure[name] for name in FIGURES[3:])
    try:
        answer = samples.timed(
            "create_ms", lambda: daemon.call("POST", "/v1/sandboxes", json={"image": "bench"})
        )
        sandbox = f"/v1/sandboxes/{answer.json()['id']}"
        floor_sandbox += floor.sandbox.samples_ms(1)
        body = {"command": [PROGRAM], "timeout_s": 30}
        for _ in range(EXECS_PER_SANDBOX):
            answer = samples.timed(
                "exec_ms", lambda: daemon.call("POST", f"{sandbox}/exec", json=body)
            )
            if answer.json()["exit_code"] != 0:
                samples.failures.append(f"exec: {answer.text}")
            floor_spawn += floor.spawn.samples_ms(1)
        samples.timed("delete_ms", lambda: daemon.call("DELETE", sandbox))
    except DaemonError as error:
        samples.failures.append(str(error))


def show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rbench: {done} of {total} sandboxes", end=end, file=sys.stderr, flush=True)


def table(figures: dict[str, dict[str, float]]) -> Table:
    result = Table(title="Milliseconds, as a client sees them, and the floors in C")
    for column in ("", "p50", "p99", "of its floor"):
        result.add_column(column, justify="right" if column else "left")
    for figure in FIGURES:
        if figure not in figures:
            result.add_row(figure, "failed", "", "", style="red")
            continue
        ratio, style = "", None
        floor, factor = FLOOR_OF.get(figure, ("", 0.0))
        if floor in figures:
            multiple = figures[figure]["p50"] / figures[floor]["p50"]
            ratio = f"{multiple:.1f} x"
            if multiple > factor:
                ratio, style = f"{ratio} (over {factor:.0f})", "red"
        values = (f"{figures[figure][name]:.2f}" for name in ("p50", "p99"))
        result.add_row(figure, *values, ratio, style=style)
    return result


def machine() -> dict[str, Any]:
    """Where the figures come from, without which they mean nothing."""
    unified, legacy = cgroup_hierarchies()
    cpu_info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in cpu_info if line.startswith("model name")]
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu": models[0] if models else "unknown",
        "cpus": os.cpu_count(),
        "memory_mb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "cgroup": "v1" if legacy else "v2" if unified else "none",
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
