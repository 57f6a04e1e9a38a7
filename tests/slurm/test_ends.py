"""Every way a job or a node can end that nobody asked for; minutes, as Slurm takes its time."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sandboxd.client import slurm as published
from sandboxd.errors import NodeDraining, SandboxdError
from tests.framework import host_state
from tests.framework.leaks import LeakCheck
from tests.slurm.conftest import Jobs, wait_for

pytestmark = pytest.mark.timeout(400)


def draining(jobs: Jobs, job: str, node: str) -> str | None:
    with jobs.client(job, node) as client:
        return client.node().admission["drain"]["why"]


def ids(jobs: Jobs, job: str, node: str) -> list[str]:
    with jobs.client(job, node) as client:
        return [one.id for one in client.list()]


def step_process(node: str) -> host_state.Process:
    """The slurmstepd of a node's daemon."""
    table = host_state.process_table()
    for one in table[os.getpid()].descendants():
        if one.name.startswith("slurmstepd") and one.state != "Z":
            for child in one.children:
                environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
                words = Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={node}".encode() in environment and b"node" in words:
                    return one
    raise AssertionError(f"no step on {node}")


def test_the_time_limit_drains_first(jobs: Jobs):
    """A limit of a minute, of which the last 30 s are the drain's."""
    jobs.cluster.environment["SANDBOXD_DRAIN_BEFORE_END_S"] = "30"
    try:
        job = jobs.launch("--nodes", "2", "--time", "1")
    finally:
        del jobs.cluster.environment["SANDBOXD_DRAIN_BEFORE_END_S"]
    end = datetime.fromisoformat(jobs.cluster.job(job)["EndTime"]).timestamp()
    found = published.nodes(job, jobs.directory)
    assert [one.job_end for one in found] == [end, end]
    for node in ("node1", "node2"):
        with jobs.client(job, node) as client:
            client.create("busybox")
    for node in ("node1", "node2"):
        wait_for(lambda node=node: draining(jobs, job, node), lambda: "it does not drain", 90)
        assert draining(jobs, job, node) == "job-end"
        with jobs.client(job, node) as client, pytest.raises(NodeDraining):
            client.create("busybox")
    # Slurm looks at time limits twice a minute, so there is time to see that all is deleted.
    for node in ("node1", "node2"):
        wait_for(lambda node=node: not ids(jobs, job, node), lambda: "they are not deleted", 60)
    jobs.cluster.wait_state(job, "TIMEOUT", within_s=150)
    jobs.wait_nothing_left(job)


def test_requeue_publishes_anew(jobs: Jobs):
    job = jobs.launch("--nodes", "2")
    before = published.nodes(job, jobs.directory)
    jobs.cluster.run(["scontrol", "requeue", job])
    wait_for(lambda: jobs.cluster.job(job)["Restarts"] == "1", lambda: "it is not requeued")
    # Slurm holds a requeued job back for two minutes.
    jobs.cluster.wait_state(job, "PENDING")
    jobs.wait_nothing_left(job)
    jobs.cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    wait_for(
        lambda: len(published.nodes(job, jobs.directory)) == 2,
        lambda: jobs.cluster.log_tail() + jobs.output(job),
        120,
    )
    after = published.nodes(job, jobs.directory)
    assert [one.restart for one in before] == [0, 0]
    assert [one.restart for one in after] == [1, 1]
    assert not {one.token for one in before} & {one.token for one in after}
    with jobs.client(job, "node2") as client, client.create("busybox") as box:
        assert box.exec(["echo", "again"]).stdout == "again\n"
    jobs.verb("stop", job)
    jobs.wait_nothing_left(job)


def test_a_daemon_that_is_killed_comes_back_at_the_same_address(jobs: Jobs):
    job = jobs.launch("--nodes", "1")
    (before,) = published.nodes(job, jobs.directory)
    step = step_process("node1")
    (serve,) = [
        one
        for one in step.descendants()
        if b"serve" in Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0")
    ]
    with jobs.client(job, "node1") as client:
        lost = client.create("busybox").id
        os.kill(serve.pid, signal.SIGKILL)

        def is_back() -> bool:
            try:
                return client.node().ready and not list(client.list())
            except SandboxdError:
                return False

        wait_for(is_back, lambda: jobs.output(job), 120)
        assert published.nodes(job, jobs.directory) == [before]
        with client.create("busybox") as box:
            assert box.id != lost
            assert box.exec(["echo", "back"]).stdout == "back\n"
    jobs.verb("stop", job)
    jobs.wait_nothing_left(job)


def test_what_sigkill_leaves_the_epilog_removes(jobs: Jobs):
    """A step all of whose processes were killed at once, as Slurm does after KillWait."""
    job = jobs.launch("--nodes", "2")
    with jobs.client(job, "node2") as client:
        client.create("busybox")
    for one in [*step_process("node2").descendants()]:
        try:
            os.kill(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_for(
        lambda: len(jobs.processes()) and not _has_step("node2"), lambda: str(jobs.processes())
    )
    assert [name[-5:] for name in jobs.instances(job)] == ["node1", "node2"]
    (told,) = json.loads(jobs.verb("status", job, "--json").stdout)
    states = {one["node"]: one["state"] for one in told["nodes"]}
    assert states == {"node1": "serving", "node2": "node-unreachable"}
    swept = jobs.cluster.run(
        [str(Path(__file__).parents[2] / "deploy/slurm/epilog")], check=True
    ).stdout.split()
    assert [Path(name).name[-5:] for name in swept] == ["node2"]
    assert [name[-5:] for name in jobs.instances(job)] == ["node1"]
    with jobs.client(job, "node1") as client, client.create("busybox") as box:
        assert box.exec(["true"]).exit_code == 0
    jobs.verb("stop", job)
    jobs.wait_nothing_left(job)


def _has_step(node: str) -> bool:
    try:
        step_process(node)
    except (AssertionError, FileNotFoundError, ProcessLookupError):
        return False
    return True


def test_a_node_that_slurm_has_lost_ends_by_itself(jobs: Jobs, leak_check: LeakCheck):
    """Its slurmd is killed: the daemon serves on, and ends when the job has without it."""
    job = jobs.launch("--nodes", "2", "--sbatch", "--no-requeue")
    jobs.cluster.kill_slurmd("node2")
    try:
        with jobs.client(job, "node2") as client, client.create("busybox") as box:
            assert box.exec(["echo", "on"]).stdout == "on\n"
        # Slurm gives it up after SlurmdTimeout, and the job with it.
        jobs.cluster.wait_state(job, "NODE_FAIL", "CANCELLED", within_s=90)
        jobs.wait_nothing_left(job)
    finally:
        jobs.cluster.start_slurmd("node2")
        leak_check.allow("slurmd pid")  # in the place of the other
        jobs.cluster.wait_nodes("idle")


def test_the_end_is_the_local_time_s(jobs: Jobs):
    """What squeue says is without a zone; it is the epoch's that the daemon is told."""
    job = jobs.launch("--nodes", "1", "--time", "30")
    (found,) = published.nodes(job, jobs.directory)
    assert found.job_end is not None
    left_s = found.job_end - datetime.now(UTC).timestamp()
    assert 25 * 60 < left_s <= 30 * 60
    jobs.verb("stop", job, "--drain", "1")
    jobs.wait_nothing_left(job)
