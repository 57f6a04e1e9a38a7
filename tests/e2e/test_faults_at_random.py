"""Each kind of fault once, under load; the long run is the tier `faults`.

`SANDBOXD_TESTS_SEED` gives other actions and another order.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tests.e2e import fault_plan
from tests.e2e.fault_run import FAULTS, FaultRun
from tests.e2e.restarts import running_node
from tests.framework.leaks import LeakCheck

SEED = int(os.environ.get("SANDBOXD_TESTS_SEED", "11"))


def test_a_seed_replays_its_actions_and_faults():
    first = list(itertools.islice(fault_plan.rounds(SEED, FAULTS), 40))
    assert first == list(itertools.islice(fault_plan.rounds(SEED, FAULTS), 40))
    assert first != list(itertools.islice(fault_plan.rounds(SEED + 1, FAULTS), 40))
    assert {one.fault for one in first[: len(FAULTS)]} == set(FAULTS)


@pytest.mark.timeout(400)
def test_nothing_that_was_promised_is_lost_whatever_breaks(
    leak_check: LeakCheck, busybox: Path, bulky: Path
):
    print(f"SANDBOXD_TESTS_SEED={SEED}")
    images = {"busybox": busybox, "bulky": bulky, "rare": busybox}
    with running_node(leak_check, images) as node:
        run = FaultRun(node)
        for planned in itertools.islice(fault_plan.rounds(SEED, FAULTS), len(FAULTS)):
            print(planned, flush=True)
            run.play(planned)
        run.end()
        print(f"{run.count} changes, {run.rounds} faults")
        assert run.count > 3 * run.rounds  # they got through to something
