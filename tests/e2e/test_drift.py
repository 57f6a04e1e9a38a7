"""Five hundred lives leave nothing behind; ten thousand are in tier `load`."""

from __future__ import annotations

import pytest

from tests.e2e import lifecycles
from tests.framework.fixtures import StartDaemon

ROUNDS = 5
A_ROUND = 100
KB_A_LIFE = 4.0
"""More is a leak; less may be a heap that is still finding its size."""


@pytest.mark.timeout(240)
def test_five_hundred_lives_leave_nothing(
    start_daemon: StartDaemon, capsys: pytest.CaptureFixture[str]
):
    daemon = start_daemon(environment={"SANDBOXD_LOG_LEVEL": "error"})
    # What is imported and allocated once: thread pools, the connection pool's most.
    lifecycles.live(daemon, 50)
    found = [lifecycles.measure(daemon)]
    for _ in range(ROUNDS):
        lifecycles.live(daemon, A_ROUND)
        found.append(lifecycles.measure(daemon, found[0]))
    with capsys.disabled():
        for figures in found:
            print(f"\n{figures}", end="")
    assert lifecycles.grown(found) == []
    # Threads of the daemon's pool are made as they are first needed, and stay.
    assert max(figures.threads for figures in found) - found[0].threads <= 8
    for name in ("daemon_kb", "launcher_kb"):
        per_life = lifecycles.slope([getattr(figures, name) for figures in found]) / A_ROUND
        assert per_life < KB_A_LIFE, f"{name} grows by {per_life:.2f} KiB a life"
