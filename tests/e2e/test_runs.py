"""Runs and draining over a real node: leases, ends that outlive a daemon, and the daemon's own
reserve."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx

from sandboxd.client import Client
from tests.e2e.host_processes import family_with, new_marker, pids_with, wait_for, wait_for_marker
from tests.e2e.restarts import running_node
from tests.framework.daemon import Daemon
from tests.framework.fixtures import StartDaemon
from tests.framework.leaks import LeakCheck

SMALL = {"memory_mb": 32, "disk_mb": 8, "pids": 16}


def ids(daemon: Daemon) -> list[str]:
    rows = daemon.http.get("/v1/sandboxes", params={"limit": 1000}).json()["sandboxes"]
    return [row["id"] for row in rows]


def test_a_controller_that_dies_takes_its_sandboxes_with_it(daemon: Daemon):
    marker = new_marker()
    if (pid := os.fork()) == 0:
        # The child dies in the middle of its block, as a trainer does that is killed.
        with Client(daemon.base_url, daemon.token) as client, client.run(lease_s=2) as run:
            box = run.create("busybox", limits=SMALL)
            box.start_process(["sleep", marker])
            os._exit(0)
    os.waitpid(pid, 0)
    wait_for_marker(marker)
    wait_for(lambda: pids_with(marker) == [], "the end of its lease")
    wait_for(lambda: ids(daemon) == [], "the end of its sandboxes")


def test_runs_and_a_drain_outlive_the_daemon(leak_check: LeakCheck, busybox: Path):
    with running_node(leak_check, {"busybox": busybox}) as node:
        daemon = node.serve()
        http = daemon.http
        assert http.put("/v1/runs/leased", json={"lease_s": 3}).status_code == 200
        assert http.put("/v1/runs/small", json={"max_sandboxes": 1}).status_code == 200
        leased = daemon.create("busybox", run="leased", limits=SMALL)
        small = daemon.create("busybox", run="small", limits=SMALL)
        assert http.delete("/v1/runs/over").status_code == 200
        node.kill_daemon(daemon)
        again = node.serve()
        refused = again.http.post("/v1/sandboxes", json={"image": "busybox", "run": "over"})
        assert refused.json()["error"]["code"] == "run-ended"
        refused = again.http.post("/v1/sandboxes", json={"image": "busybox", "run": "small"})
        assert refused.json()["error"]["code"] == "quota-exceeded"
        assert set(ids(again)) == {leased, small}
        wait_for(lambda: ids(again) == [small], "the end of a lease that an earlier daemon gave")
        used = again.http.get("/v1/node").json()["admission"]["used"]
        assert used["sandboxes"] == 1
        again.http.post("/v1/node/drain")
        node.kill_daemon(again)
        third = node.serve(ready=False)
        wait_for(lambda: _answers(third), "the API")
        third.http.headers["Authorization"] = f"Bearer {third.token}"
        wait_for(lambda: third.http.get("/v1/node").json()["ready"], "the node")
        refused = third.http.post("/v1/sandboxes", json={"image": "busybox"})
        assert refused.json()["error"]["code"] == "node-draining"
        assert third.exec(small, ["echo", "on"])["stdout"] == "on\n"
        third.http.post("/v1/node/undrain")
        third.delete(small)


def _answers(daemon: Daemon) -> bool:
    try:
        return daemon.http.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_before_its_slurm_job_ends_the_node_empties_itself(start_daemon: StartDaemon):
    end = int(time.time()) + 45  # of which a busy machine may need thirty to start a daemon
    daemon = start_daemon(
        environment={"SLURM_JOB_END_TIME": str(end), "SANDBOXD_DRAIN_BEFORE_END_S": "12"}
    )
    daemon.create("busybox", limits=SMALL)
    drain = {}

    def draining() -> bool:
        drain.update(daemon.http.get("/v1/node").json()["admission"]["drain"])
        return bool(drain["draining"])

    wait_for(draining, "the drain")
    assert drain["why"] == "job-end"
    wait_for(lambda: ids(daemon) == [], "the deadline")
    assert time.time() < end


def test_the_kernel_ends_sandboxes_first(start_daemon: StartDaemon):
    """oom_score_adj, as the OOM killer reads it: proc_pid_oom_score_adj(5)."""

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    # Where no right to less than 0 is there (a container), the same can be seen above it.
    before = Path("/proc/self/oom_score_adj").read_text()
    Path("/proc/self/oom_score_adj").write_text("300")
    try:
        daemon = start_daemon(environment={"SANDBOXD_OOM_SCORE_ADJUST": "100"})
    finally:
        Path("/proc/self/oom_score_adj").write_text(before)
    marker = new_marker()
    box = daemon.create("busybox", limits=SMALL)
    started = daemon.http.post(
        f"/v1/sandboxes/{box}/processes", json={"command": ["sleep", marker]}
    )
    assert started.status_code == 201
    wait_for_marker(marker)
    family = daemon.refresh_family()
    assert score(daemon.api_pid) == 100
    for part in ("sandboxd.host", "sandboxd.launcher"):
        assert {score(pid) for pid in family_with(family, part)} == {100}
    [command] = pids_with(marker)
    assert score(command) >= 500
    # What an image can make grow, and what is between the node and a sandbox: as any other.
    assert [score(pid) for pid in family_with(family, "/dev/fd/5")] == [0]
    assert {score(pid) for pid in family_with(family, "zygote")} == {0}
    daemon.delete(box)
