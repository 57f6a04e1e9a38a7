"""The quickstart after installation: image, SIF, daemon, and a rollout through the HTTP API.

For: a first look, and the proof that a clone works. Everything it starts ends with it, also on
Ctrl-C. Not for: measuring (`scripts/bench`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from local_daemon import DaemonError, LocalDaemon, local_daemon, signals_as_interrupt
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
WORKDIR = "/tmp/rollout"

MODULE = """\
def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle]
"""
FIXED = """\
def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 0:
        return (ordered[middle - 1] + ordered[middle]) / 2
    return ordered[middle]
"""
TESTS = """\
from statistics_of import median


def test_odd():
    assert median([3, 1, 2]) == 2


def test_even():
    assert median([4, 1, 3, 2]) == 2.5
"""
# The same story for an image without Python: a test in sh finds a bug in sh.
SHELL_MODULE = 'larger() { if [ "$1" -lt "$2" ]; then echo "$1"; else echo "$2"; fi; }\n'
SHELL_FIXED = SHELL_MODULE.replace("-lt", "-gt")
SHELL_TESTS = (
    '. ./larger.sh\n[ "$(larger 3 5)" = 5 ] || { echo "larger 3 5: not 5"; exit 1; }\necho passed\n'
)


class Failed(Exception):
    """A step did not do what it should; the message says what happened instead."""


class Progress:
    """Shows the running step and remembers how long each one took."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps: list[tuple[str, float, str]] = []

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[list[str]]:
        """The block may append a note for the table to the list it gets."""
        notes: list[str] = []
        self.console.print(f"[bold cyan]→[/] {what}")
        started = time.perf_counter()
        yield notes
        self.steps.append((what, time.perf_counter() - started, " ".join(notes)))

    def table(self) -> Table:
        table = Table(title="What each step took")
        table.add_column("step")
        table.add_column("time", justify="right")
        table.add_column("")
        for what, seconds, note in self.steps:
            table.add_row(what, readable_time(seconds), note)
        return table


def readable_time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


class Rollout:
    """One sandbox, used as a rollout worker would."""

    def __init__(self, daemon: LocalDaemon, progress: Progress) -> None:
        self.daemon = daemon
        self.progress = progress
        self.sandbox = ""

    def create(self, image: str) -> None:
        with self.progress.step("create a sandbox") as notes:
            answer = self.daemon.call("POST", "/v1/sandboxes", json={"image": image})
            self.sandbox = answer.json()["id"]
            notes.append(self.sandbox)
        self.must_run(["mkdir", "-p", WORKDIR], cwd="/")

    def write(self, what: str, files: dict[str, str]) -> None:
        with self.progress.step(what) as notes:
            for name, text in files.items():
                path = f"/v1/sandboxes/{self.sandbox}/files"
                self.daemon.call(
                    "PUT", path, params={"path": f"{WORKDIR}/{name}"}, content=text.encode()
                )
            notes.append(", ".join(files))

    def run(self, command: list[str], cwd: str = WORKDIR) -> dict[str, Any]:
        body = {"command": command, "cwd": cwd, "timeout_s": 120}
        answer = self.daemon.call("POST", f"/v1/sandboxes/{self.sandbox}/exec", json=body)
        result: dict[str, Any] = answer.json()
        return result

    def must_run(self, command: list[str], cwd: str = WORKDIR) -> None:
        result = self.run(command, cwd)
        if result["exit_code"] != 0:
            raise Failed(f"{' '.join(command)}: exit code {result['exit_code']}\n{output(result)}")

    def test(self, what: str, command: list[str], exit_code: int, says: str) -> None:
        """Run the tests and insist on the expected verdict.

        `says` is a part of their output: with the code alone a crash would look like a failed test.
        """
        with self.progress.step(what) as notes:
            self.progress.console.print(f"$ {' '.join(command)}", markup=False, highlight=False)
            result = self.run(command)
            lines = output(result).splitlines()
            notes.append(f"exit {result['exit_code']}: {lines[-1].strip('= ') if lines else ''}")
        text = output(result)
        if text:
            self.progress.console.print(text, style="dim", markup=False, highlight=False)
        if result["timed_out"] or result["exit_code"] != exit_code or says not in text:
            raise Failed(f"expected exit code {exit_code} and {says!r} in the output")

    def works(self, command: list[str]) -> bool:
        return bool(self.run(command, cwd="/")["exit_code"] == 0)

    def delete(self) -> None:
        with self.progress.step("delete the sandbox"):
            self.daemon.call("DELETE", f"/v1/sandboxes/{self.sandbox}")


def output(result: dict[str, Any]) -> str:
    return str(result["stdout"] + result["stderr"]).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="quickstart")
    parser.add_argument("--install-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("source", nargs="?", help="oci:DIR[:TAG] or rootfs:DIR")
    options = parser.parse_args()
    console = Console()
    progress = Progress(console)
    progress.steps.append(("install", options.install_s, ""))
    try:
        with signals_as_interrupt():
            quickstart(options.source, progress)
    except KeyboardInterrupt:
        console.print("quickstart: interrupted; everything it started is gone", style="red")
        return 130
    except (DaemonError, Failed) as error:
        console.print(f"quickstart: {error}", style="red", markup=False, highlight=False)
        return 1
    console.print()
    console.print(progress.table())
    say_how_to_go_on(console, options.source)
    return 0


def quickstart(source: str | None, progress: Progress) -> None:
    if source is None:
        with progress.step("make the task image"):
            layout = default_layout()
            call(str(REPOSITORY / "scripts/make-task-image"), str(layout))
            source = f"oci:{layout}"
    with local_daemon("quickstart") as daemon:
        with progress.step("convert it to SIF") as notes:
            sif = daemon.images_dir / "task.sif"
            call(str(Path(sys.executable).with_name("sif-tools")), "convert", source, str(sif))
            notes.append(f"{sif.stat().st_size / 1e6:.0f} MB")
        with progress.step("start the daemon") as notes:
            daemon.start()
            notes.append(daemon.base_url)
        rollout = Rollout(daemon, progress)
        rollout.create("task")
        if rollout.works(["python3", "-c", "import pytest"]):
            python_rollout(rollout)
        elif rollout.works(["sh", "-c", "true"]):
            progress.console.print("(the image has no pytest: the same in sh)", style="dim")
            shell_rollout(rollout)
        else:
            raise Failed("the image has neither python3 with pytest nor sh: nothing to show")
        rollout.delete()


def python_rollout(rollout: Rollout) -> None:
    # No cache: within one second, Python would take the fixed source for the compiled one.
    command = ["python3", "-B", "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"]
    rollout.write(
        "write a module with a bug, and its tests",
        {"statistics_of.py": MODULE, "test_statistics.py": TESTS},
    )
    rollout.test("tests fail", command, 1, "1 failed, 1 passed")
    rollout.write("apply the fix", {"statistics_of.py": FIXED})
    rollout.test("tests pass", command, 0, "2 passed")


def shell_rollout(rollout: Rollout) -> None:
    rollout.write(
        "write a script with a bug, and its test",
        {"larger.sh": SHELL_MODULE, "test.sh": SHELL_TESTS},
    )
    rollout.test("test fails", ["sh", "test.sh"], 1, "not 5")
    rollout.write("apply the fix", {"larger.sh": SHELL_FIXED})
    rollout.test("test passes", ["sh", "test.sh"], 0, "passed")


def default_layout() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "sandboxd/task-image")


def call(*command: str) -> None:
    """Run a program whose own words, progress included, go to the terminal."""
    if subprocess.run(command, check=False).returncode != 0:
        raise Failed(f"{Path(command[0]).name} {' '.join(command[1:])} failed (above)")


def say_how_to_go_on(console: Console, source: str | None) -> None:
    image = source or f"oci:{default_layout()}"
    console.print(
        f"""
Nothing is left running or mounted. To go on:

  mkdir -p images
  .venv/bin/sif-tools convert {image} images/task.sif
  .venv/bin/sandboxd serve --images-dir images
  .venv/bin/sandboxd run task -- python3 --version

README.md has a page of curl and Python; scripts/test runs all tests.""",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
