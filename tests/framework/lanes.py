"""Runs tiers side by side, and holds the host against what it was before.

Most tests wait: for a daemon to start, for something to end. Two cores serve two or three such
lanes in little more time than one. But what one lane makes, another's leak check would take for a
leak: so each looks at its own only (`SANDBOXD_TESTS_SHARED_HOST`), and this program, which nobody
else shares the host with, compares the whole of it once all are done.

    python -m tests.framework.lanes "unit kernel security" e2e vm
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tests.framework import leaks, times
from tests.framework.leaks import LeakCheck

SCRIPT: Final = Path(__file__).resolve().parents[2] / "scripts" / "test"
TIME_FACTOR: Final = "2"
"""Of the lanes' time-outs: each has as little as half a core at times."""
LIMIT_S: Final = 3000.0
END_S: Final = 90.0
"""From SIGINT, at which pytest names what hung, to SIGKILL."""
TELL_S: Final = 60.0


@dataclass
class Lane:
    """One run of the tests, and what it says."""

    tiers: str
    process: subprocess.Popen[bytes]
    said: BinaryIO
    began_at: float
    ended_at: float | None = None

    @classmethod
    def start(cls, tiers: str, script: Path) -> Lane:
        environment = {"SANDBOXD_TESTS_SHARED_HOST": "1", times.FACTOR: TIME_FACTOR, **os.environ}
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `tell`
        process = subprocess.Popen(
            [script, "--no-install", *tiers.split()],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that a signal reaches pytest below the shell
        )
        return cls(tiers, process, said, time.monotonic())

    @property
    def age_s(self) -> float:
        return (self.ended_at or time.monotonic()) - self.began_at

    def is_over(self) -> bool:
        if self.ended_at is None and self.process.poll() is not None:
            self.ended_at = time.monotonic()
        return self.ended_at is not None

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def tell(self) -> None:
        """Pass on all it has said."""
        print(
            f"\n===== {self.tiers}: status {self.process.returncode}, {self.age_s:.0f} s",
            flush=True,
        )
        self.said.seek(0)
        while piece := self.said.read(1 << 16):
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        self.said.close()


def run(every_lane: Sequence[str], script: Path = SCRIPT, check: LeakCheck | None = None) -> int:
    """0 if every lane passed and the host is as it was."""
    check = check or LeakCheck()
    status, lanes = 0, list[Lane]()
    try:
        with check.around("the lanes"):
            lanes = [Lane.start(tiers, script) for tiers in every_lane]
            try:
                _watch(lanes)
            finally:
                for lane in lanes:
                    if not lane.is_over():
                        lane.interrupt()
                        lane.is_over()
                    lane.tell()
            status = max(abs(lane.process.returncode) for lane in lanes)
    except leaks.Leak as leak:
        print(leak)
        status = status or 1
    for lane in lanes:
        print(f"{lane.tiers}: status {lane.process.returncode}, {lane.age_s:.0f} s")
    return 1 if status else 0


def _watch(lanes: Sequence[Lane]) -> None:
    told_at = time.monotonic()
    while any(not lane.is_over() for lane in lanes):
        if max(lane.age_s for lane in lanes) > LIMIT_S:
            return
        if time.monotonic() - told_at > TELL_S:
            told_at = time.monotonic()
            running = [f"{lane.tiers} {lane.age_s:.0f} s" for lane in lanes if not lane.is_over()]
            print("running:", "; ".join(running), flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    leaks.become_subreaper()
    sys.exit(run(sys.argv[1:]))
