"""Ten minutes of what `tests/e2e/test_faults_at_random.py` does in one.

`SANDBOXD_TESTS_SEED` replays a run: the seed is printed, and a new one drawn where none is given.
`SANDBOXD_TESTS_FAULTS_S` makes it shorter or longer.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.e2e import fault_plan
from tests.e2e.fault_run import FAULTS, FaultRun
from tests.e2e.restarts import running_node
from tests.framework.leaks import LeakCheck

SEED = int(os.environ.get("SANDBOXD_TESTS_SEED") or random.SystemRandom().randrange(10**6))
LENGTH_S = float(os.environ.get("SANDBOXD_TESTS_FAULTS_S", "600"))


@pytest.mark.timeout(int(LENGTH_S) + 300)
def test_nothing_that_was_promised_is_lost_in_ten_minutes(
    leak_check: LeakCheck, busybox: Path, bulky: Path, capsys: pytest.CaptureFixture[str]
):
    images = {"busybox": busybox, "bulky": bulky, "rare": busybox}
    with capsys.disabled():
        print(f"\nSANDBOXD_TESTS_SEED={SEED} SANDBOXD_TESTS_FAULTS_S={LENGTH_S:g}")
    end = time.monotonic() + LENGTH_S
    with running_node(leak_check, images) as node:
        run = FaultRun(node)
        for planned in fault_plan.rounds(SEED, FAULTS):
            if time.monotonic() > end:
                break
            print(planned, flush=True)
            run.play(planned)
        run.end()
        with capsys.disabled():
            print(f"{run.count} changes, {run.rounds} faults")
        assert run.count > 3 * run.rounds  # they got through to something
