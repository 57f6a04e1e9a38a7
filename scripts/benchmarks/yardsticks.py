"""What figures of ours are put beside: programs that take samples of a floor or a peer on demand.

A floor that fails ends the bench: without it, the figures say little. A peer that is missing or
fails is left out from then on, and the reason is noted.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.floors import (
    ID_BASE,
    FloorError,
    SampleProgram,
    cgroup_parents,
    compile_floor,
    image_mount,
)
from benchmarks.measurements import Key, Measurements
from benchmarks.nitrobox import DRIVER, NOTE, nitrobox_python
from benchmarks.peers import Peers, peers
from sandboxd.linux.seccomp import SANDBOX_PROFILE, compile_profile

TRUE = ("/bin/true",)
FLOORS = ("floor_sandbox", "floor_spawn")
RUNTIMES = ("bwrap", "crun", "runc")


class Yardsticks:
    """Programs are started when first asked for, and run until the end of the bench.

    `image` is where it is mounted, and a process in whose mount namespace that is.
    """

    def __init__(
        self,
        scratch: Path,
        image: tuple[Path, int],
        rooms: Peers,
        measured: Measurements,
        stack: contextlib.ExitStack,
    ) -> None:
        self._scratch = scratch
        self._lower, self._server_pid = image
        self._peers = rooms
        self._measured = measured
        self._stack = stack
        self._programs: dict[tuple[str, int, tuple[str, ...]], SampleProgram] = {}
        self._started = 0
        self._lost_ones: set[tuple[str, tuple[str, ...]]] = set()
        self._filter = scratch / "filter.bpf"
        self._filter.write_bytes(compile_profile(SANDBOX_PROFILE))

    def sample(
        self, scenario: str, measure: str, *names: str, command: Sequence[str] = TRUE
    ) -> None:
        """One sample of each, in milliseconds."""
        for name in names:
            for value in self.take(name, command=command):
                self._measured.add(Key(scenario, measure, name), value)

    def take(self, name: str, *, command: Sequence[str] = TRUE) -> list[float]:
        """One sample; none of a peer that is missing."""
        fleet = self._fleet(name, 1, command)
        if not fleet:
            return []
        try:
            return fleet[0].samples_ms(1)
        except FloorError as error:
            self._lose(name, command, error)
            return []

    def rate(self, scenario: str, measure: str, at_once: int, each: int, *names: str) -> None:
        """So many of each at once, each run `each` times in a row: runs a second (`rate`), and how
        long one took (`measure`)."""
        for name in names:
            fleet = self._fleet(name, at_once, TRUE)
            if not fleet:
                continue
            try:
                started = time.perf_counter()
                for program in fleet:
                    program.ask(each)
                samples = [value for program in fleet for value in program.answers_ms()]
                elapsed_s = time.perf_counter() - started
            except FloorError as error:
                self._lose(name, TRUE, error)
                continue
            self._measured.add(Key(scenario, "rate", name), len(samples) / elapsed_s, unit="/s")
            self._measured.add(Key(scenario, measure, name), *samples)

    def _fleet(self, name: str, at_once: int, command: Sequence[str]) -> list[SampleProgram]:
        if (name, tuple(command)) in self._lost_ones:
            return []
        try:
            return [self._program(name, number, tuple(command)) for number in range(at_once)]
        except FloorError as error:
            self._lose(name, command, error)
            return []

    def _program(self, name: str, number: int, command: tuple[str, ...]) -> SampleProgram:
        known = self._programs.get((name, number, command))
        if known is not None:
            return known
        stderr = self._scratch / f"stderr-{self._started}"
        self._started += 1
        program = SampleProgram(name, self._words(name, number, command), stderr)
        self._stack.callback(program.stop)
        program.samples_ms(1)  # what only the first one pays for is no sample
        self._programs[name, number, command] = program
        return program

    def _words(self, name: str, number: int, command: tuple[str, ...]) -> list[str]:
        if name in FLOORS:
            return self._floor(name, number, command)
        if name.startswith("nitrobox"):
            # "nitrobox" is a whole life, "nitrobox exec" and "nitrobox reset" a part of one.
            mode = name.partition(" ")[2] or "together"
            state = self._peers.stage / "nitrobox" / mode
            python = str(nitrobox_python())
            self._measured.note("nitrobox", NOTE)
            # -I: the bench has a module of that name, too.
            words = [python, "-I", str(DRIVER), str(self._peers.root), str(state), mode]
            return [*self._peers.inside, *words]
        words = self._peers.command(name, number, command)
        spawn = str(compile_floor("spawn_command", self._scratch))
        root = str(self._peers.root) if name == "chroot" else "-"
        return [*self._peers.inside, spawn, root, *words]

    def _floor(self, name: str, number: int, command: tuple[str, ...]) -> list[str]:
        stage = self._scratch / f"stage-{name}-{number}"
        stage.mkdir()
        groups = self._stack.enter_context(cgroup_parents(f"{name}-{number}"))
        first = [str(self._filter)] if name == "floor_spawn" else []
        job = [str(self._lower), str(stage), str(ID_BASE), command[0], *groups]
        inside = ["nsenter", f"--mount=/proc/{self._server_pid}/ns/mnt", "--"]
        return [*inside, str(compile_floor(name, self._scratch)), *first, *job]

    def _lose(self, name: str, command: Sequence[str], error: FloorError) -> None:
        if name in FLOORS:
            raise error
        self._lost_ones.add((name, tuple(command)))
        what = name if tuple(command) == TRUE else f"{name}: {' '.join(command)}"
        self._measured.note(what, f"left out: {error}")


@contextlib.contextmanager
def yardsticks(sif: Path, scratch: Path, measured: Measurements) -> Iterator[Yardsticks]:
    """Over the image `sif`, with files in the empty directory `scratch`."""
    with contextlib.ExitStack() as stack:
        lower, server = stack.enter_context(image_mount(sif, scratch))
        group = f"{scratch.parent.name}-peers"
        rooms = stack.enter_context(peers(lower, server.pid, scratch, group))
        for name in RUNTIMES:
            if shutil.which(name):
                measured.note(name, version(name))
        measured.note("crun, no limits", "crun without a cgroup")
        measured.note("floor_sandbox", "in C: groups, clone, place, mount, pivot, exec")
        measured.note("floor_spawn", "in C: spawn and wait under an inherited filter")
        measured.note("chroot", "chroot(2) and spawn, in C; no wall")
        yield Yardsticks(scratch, (lower, server.pid), rooms, measured, stack)


def version(name: str) -> str:
    done = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0].strip() or f"{name}, version unknown"
