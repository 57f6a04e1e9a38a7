"""Lanes: each runs, each is heard, and one that fails or leaves something fails all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.framework import lanes
from tests.framework.leaks import LeakCheck

SCRIPT = """#!/bin/sh
[ "$1" = --no-install ] || exit 9
shift
echo "these are $*, beside others: $SANDBOXD_TESTS_SHARED_HOST, slower: $SANDBOXD_TESTS_TIME_FACTOR"
[ "$1" != leaky ] || touch {left}
[ "$1" != failing ]
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "watched").mkdir()
    made = tmp_path / "test"
    made.write_text(SCRIPT.format(left=tmp_path / "watched" / "left"))
    made.chmod(0o755)
    return made


def check(script: Path) -> LeakCheck:
    watched = {script.parent / "watched"}
    return LeakCheck(shared_host=True, settle_s=0.2, directories=watched)


def test_the_script_takes_what_a_lane_gives_it() -> None:
    done = subprocess.run(
        [lanes.SCRIPT, "--no-install", "unit", "e2ee"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "test: no such tier: e2ee")


def test_all_are_run_and_heard(script: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert lanes.run(["unit kernel", "e2e"], script, check(script)) == 0
    said = capfdbinary.readouterr().out.decode()
    assert "these are unit kernel, beside others: 1, slower: 2\n" in said
    assert "these are e2e, beside" in said


def test_one_that_fails_fails_all(script: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert lanes.run(["unit", "failing", "e2e"], script, check(script)) == 1
    assert "failing: status 1" in capfdbinary.readouterr().out.decode()


def test_what_one_leaves_behind_fails_all(
    script: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert lanes.run(["unit", "leaky"], script, check(script)) == 1
    assert "the lanes left behind:" in capfdbinary.readouterr().out.decode()


def test_one_that_hangs_is_interrupted(
    script: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text("#!/bin/bash\ntrap 'echo stopped; exit 3' INT\nsleep 60 & wait\n")
    monkeypatch.setattr(lanes, "LIMIT_S", 0.5)
    assert lanes.run(["unit"], script, check(script)) == 1
    assert "stopped" in capfdbinary.readouterr().out.decode()
