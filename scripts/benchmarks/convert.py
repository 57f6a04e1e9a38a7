"""Converts an OCI image with sif-tools, and with the tools that one would use without it.

    theirs   skopeo copy; umoci unpack; mksquashfs -comp gzip
    ours     sif-tools convert

Both read the same layout in the same run and in turns, so that a slower minute of the machine hits
both. Memory and scratch space are those of all processes together, sampled; scratch counts files
without a name too. Not for: many images (`sif-tools convert --batch` reports on itself).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from quickstart import default_layout
from rich.console import Console
from rich.table import Table

from benchmarks.layers import grow
from benchmarks.machine import describe_machine

REPOSITORY = Path(__file__).resolve().parents[2]
ROUNDS = 3
SAMPLE_S = 0.01
# What must hold: times faster, times the bytes, bytes of memory.
LEAST_SPEED, MOST_SIZE, MOST_MEMORY = 5.0, 1.1, 300 << 20


@dataclass
class Run:
    seconds: float
    cpu_seconds: float  # of all processes: what does not depend on who else is busy
    size_bytes: int
    memory_peak_bytes: int
    scratch_peak_bytes: int


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench --convert", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        theirs, ours, image = measure(options.rounds)
    except KeyboardInterrupt:
        return 130
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        console.print(f"bench: {error}", style="red", markup=False, highlight=False)
        return 1
    speed = median(theirs).seconds / median(ours).seconds
    size = median(ours).size_bytes / median(theirs).size_bytes
    memory = max(run.memory_peak_bytes for run in ours)
    if options.json:
        document = {
            "image_bytes": image,
            "theirs": [asdict(run) for run in theirs],
            "ours": [asdict(run) for run in ours],
            "times_faster": round(speed, 2),
            "times_the_size": round(size, 3),
            "memory_peak_bytes": memory,
            "machine": describe_machine(),
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    console.print(table(median(theirs), median(ours)))
    missed = []
    if speed < LEAST_SPEED:
        missed.append(f"{speed:.1f} times faster, not {LEAST_SPEED:.0f}")
    if size > MOST_SIZE:
        missed.append(f"{size:.2f} times the bytes, not {MOST_SIZE}")
    if memory > MOST_MEMORY:
        missed.append(f"{memory >> 20} MiB of memory, not {MOST_MEMORY >> 20}")
    for one in missed:
        console.print(f"missed: {one}", style="red")
    return 1 if missed else 0


def measure(rounds: int) -> tuple[list[Run], list[Run], int]:
    """Runs of theirs and of ours, and the bytes of the image's layers."""
    base = default_layout()
    subprocess.run([REPOSITORY / "scripts/make-task-image", base], check=True)
    with tempfile.TemporaryDirectory(prefix="bench-convert-") as name:
        scratch = Path(name)
        layout = scratch / "layout"
        say("three more layers")
        grow(base, layout)
        image = sum(one.stat().st_size for one in (layout / "blobs/sha256").iterdir())
        theirs, ours = [], []
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            theirs.append(run_theirs(layout, scratch / "theirs"))
            ours.append(run_ours(layout, scratch / "ours"))
        return theirs, ours, image


def run_theirs(layout: Path, scratch: Path) -> Run:
    scratch.mkdir()
    policy = scratch / "policy.json"
    policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    copy, bundle, made = scratch / "copy", scratch / "bundle", scratch / "made.squashfs"
    commands: list[list[str | Path]] = [
        ["skopeo", "--policy", policy, "copy", "-q", f"oci:{layout}:latest", f"oci:{copy}:latest"],
        ["umoci", "unpack", "--image", f"{copy}:latest", bundle],
        ["mksquashfs", bundle / "rootfs", made, "-comp", "gzip", "-noappend", "-no-progress"],
    ]
    return timed(commands, made, scratch)


def run_ours(layout: Path, scratch: Path) -> Run:
    scratch.mkdir()
    made = scratch / "made.sif"
    convert = Path(sys.executable).with_name("sif-tools")
    return timed([[convert, "convert", f"oci:{layout}:latest", made]], made, scratch)


def timed(commands: list[list[str | Path]], made: Path, scratch: Path) -> Run:
    temporary = scratch / "tmp"
    temporary.mkdir()
    seconds, memory, disk = 0.0, 0, 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in commands:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        with Sampler(process.pid, made) as sampler:
            status = process.wait()
        seconds += time.perf_counter() - started
        if status != 0:
            raise subprocess.CalledProcessError(status, command)
        kept = sum(one.stat().st_blocks * 512 for one in files_below(scratch) if one != made)
        memory, disk = max(memory, sampler.memory), max(disk, sampler.disk, kept)
    size = made.stat().st_size
    shutil.rmtree(scratch)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Run(round(seconds, 3), round(cpu, 3), size, memory, disk)


def files_below(directory: Path) -> Iterator[Path]:
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                yield path


class Sampler:
    """Looks at a process and all below it; keeps the highest memory and unnamed scratch space."""

    def __init__(self, pid: int, made: Path) -> None:
        self._pid = pid
        self._made = made
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.memory = self.disk = 0

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            memory, unnamed = 0, {}
            for pid in tree(self._pid):
                with suppress(OSError, ValueError):
                    memory += proportional_bytes(pid)
                    for fd in Path(f"/proc/{pid}/fd").iterdir():
                        with suppress(OSError):
                            status = fd.stat()
                            if status.st_nlink == 0:
                                unnamed[status.st_dev, status.st_ino] = status.st_blocks * 512
            self.memory = max(self.memory, memory)
            self.disk = max(self.disk, sum(unnamed.values()))


def tree(pid: int) -> Iterator[int]:
    """A process and what it has started, as far as they live."""
    todo = [pid]
    while todo:
        one = todo.pop()
        yield one
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]


def proportional_bytes(pid: int) -> int:
    """Memory with shared pages divided among those that share them (proc(5), smaps_rollup)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise ValueError("no Pss")


def median(runs: list[Run]) -> Run:
    """The run with the median time."""
    middle = statistics.median_low([run.seconds for run in runs])
    return next(run for run in runs if run.seconds == middle)


def table(theirs: Run, ours: Run) -> Table:
    result = Table(title="An OCI image of four gzip layers to a file that can be mounted")
    for column in ("", "seconds", "of CPU", "MiB made", "MiB memory", "MiB scratch"):
        result.add_column(column, justify="right" if column else "left")
    for name, run in (("skopeo, umoci, mksquashfs", theirs), ("sif-tools convert", ours)):
        sizes = (run.size_bytes, run.memory_peak_bytes, run.scratch_peak_bytes)
        times = (f"{one:.2f}" for one in (run.seconds, run.cpu_seconds))
        result.add_row(name, *times, *(f"{one / (1 << 20):.1f}" for one in sizes))
    return result


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
