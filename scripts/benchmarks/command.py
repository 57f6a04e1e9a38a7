"""The entry of `scripts/bench`: scenarios, or with its first word the bench of a part."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from local_daemon import DaemonError, signals_as_interrupt
from rich.console import Console

from benchmarks import plots, report
from benchmarks.floors import FloorError
from benchmarks.machine import REPOSITORY, describe_machine
from benchmarks.measurements import Measurements
from benchmarks.rig import FULL, QUICK, TINY, Rig, rig
from benchmarks.scenarios import SCENARIOS, soak
from benchmarks.scenarios.files import WriteFailed
from benchmarks.targets import MUST_REACH, Outcome, judge_all
from sandboxd.client import SandboxdError

SIZES = {"full": FULL, "quick": QUICK, "tiny": TINY}
DESCRIPTION = """\
Measures sandboxd at its API beside C floors and peers in the same run.

Other benches, each with a --help of its own: bench --client (the asyncio client beside raw
aiohttp), bench --convert (an image beside the tools that sif-tools replaces), bench --store (many
images that share layers).
"""
EPILOG = """\
Ends with 0 if all that was run reached its targets, 3 if one was missed, 1 if anything failed.
"""


def main(arguments: list[str]) -> int:
    part = arguments[0] if arguments else ""
    if part in ("--client", "--convert", "--store"):
        return bench_of_a_part(part, arguments[1:])
    options = parse(arguments)
    size = "tiny" if options.tiny else "quick" if options.quick else "full"
    console = Console()
    machine = describe_machine()
    measured = Measurements()
    chosen = options.only or ([] if options.soak else list(SCENARIOS))
    try:
        with signals_as_interrupt():
            if chosen:
                with rig(SIZES[size], options.image, measured) as work:
                    for name in chosen:
                        run(name, work, console)
            if options.soak:
                with rig(SIZES[size], options.image, measured, soak.SETTINGS) as work:
                    say(f"soak, {options.soak:g} minutes")
                    soak.soak(work, options.soak)
    except KeyboardInterrupt:
        return 130
    except (DaemonError, FloorError, subprocess.CalledProcessError) as error:
        measured.fail(str(error))
    verdicts = judge_all(MUST_REACH, measured.summaries())
    if size != "tiny" and chosen == list(SCENARIOS):
        for one in verdicts:
            if one.outcome is Outcome.NOT_MEASURED:
                measured.fail(f"not measured: {one.target.key}")
    report.show(console, measured, verdicts, machine)
    node = report.document(measured, verdicts, machine, size)
    if options.json:
        options.json.write_text(report.to_text(node))
    if options.out:
        for path in plots.draw(measured, verdicts, options.out):
            say(f"drawn: {path}")
        (options.out / "bench.json").write_text(report.to_text(node))
    if measured.failures:
        return 1
    return 3 if any(one.outcome is Outcome.MISSED for one in verdicts) else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: two minutes, not ten")
    parser.add_argument(
        "--tiny", action="store_true", help="next to no samples: only to see that everything works"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--out",
        type=output_folder,
        metavar="DIR",
        help="write plots (PNG) and bench.json there; not in the repository",
    )
    parser.add_argument(
        "--soak",
        type=minutes,
        metavar="MINUTES",
        help="churn for so long, looking for leaks and drift; alone unless --only is given too",
    )
    parser.add_argument("--image", type=Path, metavar="SIF", help="default: the task image")
    return parser.parse_args(arguments)


def output_folder(text: str) -> Path:
    path = Path(text).resolve()
    if path.is_relative_to(REPOSITORY):
        raise argparse.ArgumentTypeError(f"{path} is in the repository")
    return path


def minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < 7 * 24 * 60:
        raise argparse.ArgumentTypeError("more than 0, and less than a week")
    return value


def run(name: str, work: Rig, console: Console) -> None:
    """One scenario. What goes wrong in it is noted, and the others are still run."""
    say(name)
    started = time.perf_counter()
    try:
        SCENARIOS[name](work)
    except (SandboxdError, WriteFailed) as error:
        work.measured.fail(f"{name}: {type(error).__name__}: {error}")
        console.print(f"failed: {name}: {error}", style="red", markup=False, highlight=False)
    say(f"{name}: {time.perf_counter() - started:.1f} s")


def bench_of_a_part(part: str, arguments: list[str]) -> int:
    # Each needs what the others do not (aiohttp), or is not at hand without `--with test`.
    if part == "--client":
        from benchmarks import client  # noqa: PLC0415

        return client.main(arguments)
    if part == "--convert":
        from benchmarks import convert  # noqa: PLC0415

        return convert.main(arguments)
    from benchmarks import store  # noqa: PLC0415

    return store.main(arguments)


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
