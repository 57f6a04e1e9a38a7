"""Ten thousand lives: what grows, and by how much a life."""

from __future__ import annotations

import dataclasses

import pytest

from tests.e2e import lifecycles
from tests.framework.fixtures import StartDaemon

ROUNDS = 20
A_ROUND = 500
KB_A_LIFE = 1.0
"""A sandbox's record alone is more; less is a heap that is still finding its size."""
SLAB_KB_A_LIFE = 8.0
"""Of the whole machine, others' work included; a sandbox that stayed would be 300 and more."""

pytestmark = pytest.mark.needs(
    "root", "namespaces", "overlay", "fuse", "cgroup-kill", "cgroup-limits"
)


@pytest.mark.timeout(3600)
def test_ten_thousand_lives_leave_nothing(
    start_daemon: StartDaemon, capsys: pytest.CaptureFixture[str]
):
    daemon = start_daemon(environment={"SANDBOXD_LOG_LEVEL": "error"})
    lifecycles.live(daemon, A_ROUND)
    found = [lifecycles.measure(daemon)]
    for number in range(ROUNDS):
        lifecycles.live(daemon, A_ROUND)
        found.append(lifecycles.measure(daemon, found[0]))
        with capsys.disabled():
            print(f"\n{(number + 1) * A_ROUND}: {found[-1]}", end="", flush=True)
    drift = {
        field.name: lifecycles.slope([getattr(one, field.name) for one in found]) / A_ROUND
        for field in dataclasses.fields(lifecycles.Figures)
    }
    with capsys.disabled():
        print("\na life:", ", ".join(f"{name} {value:+.5f}" for name, value in drift.items()))
    assert lifecycles.grown(found) == []
    assert max(figures.threads for figures in found) - found[0].threads <= 8
    assert drift["daemon_kb"] < KB_A_LIFE
    assert drift["launcher_kb"] < KB_A_LIFE
    assert drift["slab_kb"] < SLAB_KB_A_LIFE
