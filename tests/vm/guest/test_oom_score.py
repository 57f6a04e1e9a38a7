"""What needs CAP_SYS_RESOURCE, which root has not everywhere: here it has."""

from __future__ import annotations

from pathlib import Path

from sandboxd.linux import cgroup, child
from sandboxd.linux.probes import cgroups
from tests.framework import times


def test_the_probe_of_memory_is_within_reach_of_the_oom_killer() -> None:
    """A service manager may have set OOMScoreAdjust=-1000, and nobody could be killed."""

    def work() -> None:
        Path("/proc/self/oom_score_adj").write_text("-1000")
        cgroups.memory_limit(cgroup.layout())

    child.run(work, times.scaled(30))
