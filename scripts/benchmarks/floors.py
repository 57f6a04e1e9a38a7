"""The C floors: what the kernel alone takes for a sandbox and for an exec, and how they are run.

They do the same job as sandboxd on the same image (a squashfuse mount of the same SIF, the same
cgroup hierarchies, the same seccomp filter), in the fewest system calls, and run all the time, so
that samples of both can be taken in turn. Not for: measuring anything through the API.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from sandboxd.init.build import WARNINGS, find_compiler
from sandboxd.launcher.image_server import PRELOAD, told_of
from sif_tools.partition import mountable_partition
from sif_tools.reader import read_sif

SOURCES = Path(__file__).resolve().parent / "floor"
CONTROLLERS = ("memory", "cpu", "pids")
# Host ids that are nobody's: any will do, since the floors own nothing outside their namespaces.
ID_BASE = 3_000_000_000
MOUNT_S = 10.0


class FloorError(Exception):
    """A floor could not be built or run; the message is for a person."""


class SampleProgram:
    """A running program that is told how many samples to take and prints them (`floor/floor.h`).

    What it says on stderr goes to the file `words`: never to the caller's own, for runc and crun
    give what they find there to the root of their container.
    """

    def __init__(self, name: str, command: list[str], words: Path) -> None:
        self.name = name
        self._words = words
        with words.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def samples_ms(self, count: int) -> list[float]:
        """Raises FloorError."""
        self.ask(count)
        return self.answers_ms()

    def ask(self, count: int) -> None:
        """Let it begin; `answers_ms` waits for it."""
        assert self._process.stdin is not None
        try:
            print(count, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def answers_ms(self) -> list[float]:
        assert self._process.stdout is not None
        samples: list[float] = []
        for line in self._process.stdout:
            if line == ".\n":
                return samples
            samples.append(float(line))
        raise self._ended()

    def _ended(self) -> FloorError:
        said = self._words.read_text(errors="replace").strip().splitlines()[-3:]
        return FloorError(f"{self.name} ended: {'; '.join(said) or 'without a word'}")

    def stop(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def compile_floor(name: str, scratch: Path) -> Path:
    """The program `name` of `floor/`, built once in a run."""
    output = scratch / name
    if output.exists():
        return output
    command = [find_compiler(), *WARNINGS, "-O2", "-static", "-o", str(output)]
    command += [str(SOURCES / "floor.c"), str(SOURCES / f"{name}.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FloorError(f"{' '.join(command)}\n{done.stderr}")
    return output


def server_environment(sif: Path, offset_bytes: int) -> list[str]:
    """Of a squashfuse_ll as sandboxd has it, as words of env(1)."""
    with sif.open("rb") as file:
        told = told_of(file.fileno(), offset_bytes)
    return [f"LD_PRELOAD={PRELOAD}", *(f"{name}={value}" for name, value in told.items())]


@contextlib.contextmanager
def image_mount(sif: Path, scratch: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Mount the SIF's root with squashfuse_ll, as sandboxd does, in a mount namespace of its own.

    The mount and the namespace end with the process that is given, at the latest.
    """
    program = shutil.which("squashfuse_ll")
    if program is None:
        raise FloorError("squashfuse_ll is missing (package squashfuse)")
    partition = mountable_partition(read_sif(sif), sif)
    mountpoint = scratch / "lower"
    mountpoint.mkdir()
    options = f"ro,allow_other,offset={partition.offset_bytes}"
    command = ["unshare", "--mount", "env", *server_environment(sif, partition.offset_bytes)]
    command.append(program)
    command += ["-f", "-o", options, str(sif), str(mountpoint)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + MOUNT_S
        mountinfo = Path(f"/proc/{server.pid}/mountinfo")
        while f" {mountpoint} " not in mountinfo.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise FloorError("squashfuse_ll does not mount the image")
            time.sleep(0.005)
        yield mountpoint, server
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def cgroup_parents(name: str) -> Iterator[list[str]]:
    """A group of our own in each hierarchy sandboxd would use: `[v2 or "-", v1 …]`.

    With cgroup v1, memory, cpu and pids are hierarchies of their own, and the v2 one has no
    controllers.
    """
    unified, legacy = cgroup_hierarchies()
    group = f"sandboxd-bench-{os.getpid()}-{name}"
    made: list[Path] = []
    try:
        parents = []
        for root in (unified, *legacy):
            if root is None:
                parents.append("-")
                continue
            directory = root / group
            if root == unified and not legacy:
                enable_controllers(root)
            directory.mkdir()
            made.append(directory)
            if root == unified and not legacy:
                enable_controllers(directory)
            parents.append(str(directory))
        yield parents
    finally:
        for directory in made:
            directory.rmdir()


def cgroup_hierarchies() -> tuple[Path | None, list[Path]]:
    """The mount point of the v2 hierarchy, if any, and those of the v1 ones that limit."""
    unified: Path | None = None
    legacy: list[Path] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")
        mountpoint = Path(before.split(" ")[4])
        if kind == "cgroup2":
            unified = mountpoint
        elif kind == "cgroup" and any(name in CONTROLLERS for name in options.split(",")):
            legacy.append(mountpoint)
    return unified, legacy


def enable_controllers(group: Path) -> None:
    (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
