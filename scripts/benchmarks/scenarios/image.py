"""The image's own file system: as sandboxd serves it, as the kernel does (`image_backend`), with
squashfuse left to itself, and as a directory on disk; an overlay on each, as in a sandbox.

Without sandboxd around it, whose other costs hide the difference. Cold means that nothing of the
image's file is in memory and it has just been mounted; of the directory only the content of its
files is dropped, names and attributes stay known. Slow: likewise, and the image's file lies where
every read takes LATENCY_MS (`slow_files`); ``copied`` is what the second sandbox of a node has that
copies its hot images (`image_copies_mb`): the copy is made before, and not counted.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.floors import FloorError, SampleProgram, compile_floor, server_environment
from benchmarks.measurements import OURS, Key
from benchmarks.rig import Rig
from benchmarks.scenarios.python_start import drop_from_memory
from sif_tools.partition import mountable_partition
from sif_tools.reader import read_sif

SCENARIO = "Image"
LATENCY_MS = 2.0
"""Of a read from a busy network file system, roughly; nothing was measured for it."""
PYTHON = ("python3", "-c", "import json, asyncio, unittest")
COMMANDS = {
    "true": ("/bin/true",),
    "python": PYTHON,
    "find": ("find", "/", "-xdev", "-newer", "/etc/passwd"),
}
MOUNTS = {
    OURS: 'env $1 squashfuse_ll -f -o "ro,offset=$3" "$2" lower & server=$!',
    "squashfuse": 'squashfuse_ll -f -o "ro,offset=$3" "$2" lower & server=$!',
    "kernel": 'mount -t squashfs -o "loop,ro,offset=$3" "$2" lower; server=',
    "directory": 'mount --bind "$4" lower; server=',
}
"""With the arguments: the environment of sandboxd's squashfuse, the SIF, the offset of its file
system, the directory."""
SETUP = """
set -eu
cd "$5"
mount -t tmpfs none .
cd "$5"
mkdir lower upper work root
{mount}
until mountpoint -q lower; do
    kill -0 "$server"
    sleep 0.01
done
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work none root
echo ready
read -r _ || true
umount -l root
umount -l lower
wait
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the file system of the bench's image lies."""

    sif: Path
    offset_bytes: int
    directory: Path
    scratch: Path
    spawn: Path


def image(rig: Rig) -> None:
    scratch = rig.daemon.home / "image"
    scratch.mkdir()
    offset = mountable_partition(read_sif(rig.sif), rig.sif).offset_bytes
    directory = scratch / "directory"
    extract = ["unsquashfs", "-quiet", "-no-progress", "-offset", str(offset)]
    subprocess.run([*extract, "-d", directory, rig.sif], check=True, stdout=subprocess.DEVNULL)
    place = Place(rig.sif, offset, directory, scratch, compile_floor("spawn_command", scratch))
    rig.measured.note("squashfuse", "squashfuse_ll without what sandboxd puts into it")
    rig.measured.note("kernel", 'squashfs on a loop device: image_backend = "kernel"')
    rig.measured.note("directory", "the image's files on disk; no wall, no image")
    rig.measured.note("slow", f"the image's file lies where each read takes {LATENCY_MS:g} ms")
    rig.measured.note("copied", "the same once the node has a copy of its own")
    warm(rig, place)
    for number in range(rig.size.slow_rounds):
        cold(rig, place, number)
        slow(rig, place, number)


def warm(rig: Rig, place: Place) -> None:
    with contextlib.ExitStack() as stack:
        programs = {
            (measure, subject): stack.enter_context(
                sampled(place, subject, inside, measure, command)
            )
            for subject in MOUNTS
            for inside in [stack.enter_context(mounted(place, subject))]
            for measure, command in COMMANDS.items()
        }
        for (measure, subject), program in programs.items():
            program.samples_ms(2)
            rig.measured.units.setdefault((SCENARIO, measure), "ms")
            rig.measured.samples.setdefault(Key(SCENARIO, measure, subject), [])
        for _ in range(max(1, rig.size.rounds // 5)):
            for (measure, subject), program in programs.items():
                rig.measured.add(Key(SCENARIO, measure, subject), *program.samples_ms(1))


def cold(rig: Rig, place: Place, number: int) -> None:
    """Mount and start Python. Each comes first in its turn: what lies below this machine's disk
    remembers, too."""
    first = number % len(MOUNTS)
    for subject in (*list(MOUNTS)[first:], *list(MOUNTS)[:first]):
        drop_from_memory(str(place.sif))
        if subject == "directory":
            for directory, _, names in os.walk(place.directory):
                for name in names:
                    path = f"{directory}/{name}"
                    if os.path.isfile(path) and not os.path.islink(path):
                        drop_from_memory(path)
        taken_ms = first_start_ms(place, subject)
        rig.measured.add(Key(SCENARIO, "cold python", subject), taken_ms)


def slow(rig: Rig, place: Place, number: int) -> None:
    """The same from storage that is far away."""
    subjects = (OURS, "squashfuse", "kernel", "copied")
    first = number % len(subjects)
    for subject in (*subjects[first:], *subjects[:first]):
        if subject == "copied":
            drop_from_memory(str(place.sif))
            taken_ms = first_start_ms(place, OURS)
        else:
            with slow_storage(place) as sif:
                taken_ms = first_start_ms(replace(place, sif=sif), subject)
        rig.measured.add(Key(SCENARIO, "slow python", subject), taken_ms)


def first_start_ms(place: Place, subject: str) -> float:
    """The mount and Python's start."""
    started = time.perf_counter()
    with (
        mounted(place, subject) as inside,
        sampled(place, subject, inside, "cold", PYTHON) as program,
    ):
        program.samples_ms(1)
        return (time.perf_counter() - started) * 1000


@contextlib.contextmanager
def slow_storage(place: Place) -> Iterator[Path]:
    """The image's file on storage that is far away; nothing of it is in memory there."""
    directory = place.scratch / "slow"
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.slow_files", place.sif, directory, LATENCY_MS]
    with subprocess.Popen(
        [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        if server.stdout.readline() != b"ready\n":
            raise FloorError("no slow storage (the reason is above)")
        yield directory / place.sif.name


@contextlib.contextmanager
def mounted(place: Place, subject: str) -> Iterator[list[str]]:
    """The words that put a command where the image is mounted, at `stage/root` of the scratch."""
    stage = place.scratch / "stage"
    stage.mkdir(exist_ok=True)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    command += [SETUP.replace("{mount}", MOUNTS[subject]), "sh"]
    environment = " ".join(server_environment(place.sif, place.offset_bytes))
    arguments = (environment, place.sif, place.offset_bytes, place.directory, stage)
    with subprocess.Popen(
        [*command, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise FloorError(f"{subject}: the image cannot be mounted (the reason is above)")
        # What is mounted ends with the holder's input, at the end of this block.
        yield ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"]


@contextlib.contextmanager
def sampled(
    place: Place, subject: str, inside: list[str], measure: str, command: Sequence[str]
) -> Iterator[SampleProgram]:
    words = [*inside, str(place.spawn), str(place.scratch / "stage/root"), *command]
    program = SampleProgram(subject, words, place.scratch / f"stderr-{subject}-{measure}")
    try:
        yield program
    finally:
        program.stop()
