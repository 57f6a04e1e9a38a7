"""Limits in the files of cgroup v2, where one hierarchy has every controller and layers are on a
disk: there is nothing that is not held."""

from __future__ import annotations

import os

import pytest

from tests.e2e.host_processes import new_marker, pids_with
from tests.e2e.test_limits import cgroup_files
from tests.framework.daemon import Daemon

MIB = 1 << 20
IO = {"io_read_bps": MIB, "io_write_bps": 2 * MIB, "io_read_iops": 64, "io_write_iops": 128}


@pytest.mark.needs("loop")
def test_the_kernels_own_files_hold_every_limit(daemon: Daemon) -> None:
    node = daemon.http.get("/v1/node").json()
    assert set(node["enforcement"].values()) == {"enforced"}
    last = max(os.sched_getaffinity(0))
    marker = new_marker()
    limits = {"cpu_weight": 400, "cpuset": str(last), "disk_mb": 16, **IO}
    with daemon.sandbox("busybox", limits=limits) as sandbox:
        daemon.exec(sandbox, f"sleep {marker} & true")
        (pid,) = pids_with(marker)

        def said(name: str) -> str:
            return cgroup_files(pid, "cpu", {"v2": name, "v1": name})["v2"]

        assert said("cpu.weight") == "400"
        assert said("cpuset.cpus") == str(last)
        assert os.sched_getaffinity(pid) == {last}
        _, told = said("io.max").split(" ", 1)
        assert told == f"rbps={MIB} wbps={2 * MIB} riops=64 wiops=128"
    with daemon.sandbox("busybox") as sandbox:
        marker = new_marker()
        daemon.exec(sandbox, f"sleep {marker} & true")
        (pid,) = pids_with(marker)
        assert [said(name) for name in ("cpu.weight", "cpuset.cpus", "io.max")] == ["100", "", ""]
