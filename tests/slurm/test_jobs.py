"""Jobs with a daemon on every node: brought up, found, used, ended. Slurm is the real one."""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
from pathlib import Path

import pytest

from sandboxd.client import Client
from sandboxd.client import slurm as published
from sandboxd.errors import SandboxdError
from tests.slurm.conftest import NOBODY, Jobs, wait_for

pytestmark = pytest.mark.timeout(240)


def test_launch_status_exec_stop(jobs: Jobs):
    job = jobs.launch("--nodes", "3")
    assert jobs.cluster.job(job)["JobState"] == "RUNNING"

    # What Slurm calls the nodes, and nothing that anybody else may read.
    where = jobs.directory / job
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in where.iterdir()}
    assert files == {"node1.json": 0o600, "node2.json": 0o600, "node3.json": 0o600}
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    found = published.nodes(job, jobs.directory)
    assert len({one.url for one in found}) == 3
    assert len({one.token for one in found}) == 3

    for one in found:
        assert json.loads((where / f"{one.node}.json").read_text())["token"] == one.token
        with jobs.client(job, one.node) as client, client.create("busybox") as box:
            assert client.node().name == one.node
            assert box.exec(["id", "-u"]).stdout == "0\n"
    # Another node's token opens nothing.
    one, other = found[:2]
    with Client(one.url, other.token) as stranger, pytest.raises(SandboxdError) as refused:
        stranger.node()
    assert refused.value.code == "unauthorized"

    with jobs.client(job, "node2") as client:
        client.create("busybox")
        (told,) = json.loads(jobs.verb("status", job, "--json").stdout)
    assert told["state"] == "RUNNING"
    assert [(n["node"], n["state"], n["sandboxes"]) for n in told["nodes"]] == [
        ("node1", "serving", 0),
        ("node2", "serving", 1),
        ("node3", "serving", 0),
    ]
    shown = jobs.verb("status").stdout  # without a job: all that have published
    assert [line.split()[2] for line in shown.splitlines()[1:]] == ["node1", "node2", "node3"]
    assert not any(one.token in shown + json.dumps(told) for one in found)

    # That there is something to be left.
    assert len(jobs.instances(job)) == 3
    assert jobs.cgroups()
    assert jobs.processes()
    jobs.verb("stop", job)
    assert jobs.cluster.job(job)["JobState"] == "CANCELLED"
    jobs.wait_nothing_left(job)
    assert jobs.verb("status", "--json").stdout.strip() == "[]"


def test_the_job_is_a_command_that_finds_its_node_s_daemon(jobs: Jobs):
    """Its exit status is the job's, and the daemons end with it."""
    worker = jobs.cluster.home / "worker.py"
    worker.write_text(
        textwrap.dedent("""\
            import os
            from sandboxd.client import Client
            with Client.from_slurm() as client, client.create("busybox") as box:
                answer = box.exec(["sh", "-c", "echo $((6 * 7))"]).stdout.strip()
                print("worker", os.environ["SLURMD_NODENAME"], client.url, answer, flush=True)
        """)
    )
    run = f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 {sys.executable} {worker}"
    script = f"{run}; exit 7"
    job = jobs.submit("--nodes", "2", "--", "bash", "-c", script)
    ended = jobs.cluster.wait_state(job, "FAILED", "COMPLETED", within_s=120)
    assert ended["ExitCode"] == "7:0"
    lines = [line.split() for line in jobs.output(job).splitlines() if line.startswith("worker")]
    assert sorted((line[1], line[3]) for line in lines) == [("node1", "42"), ("node2", "42")]
    assert len({line[2] for line in lines}) == 2
    jobs.wait_nothing_left(job)


def test_scancel_ends_a_job_that_is_busy(jobs: Jobs):
    job = jobs.launch("--nodes", "2")
    for node in ("node1", "node2"):
        with jobs.client(job, node) as client:
            box = client.create("busybox")
            box.start_process(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    assert any("sleep" in one or "sh" in one.split()[0] for one in jobs.processes())
    jobs.cluster.run(["scancel", job])
    jobs.cluster.wait_state(job, "CANCELLED")
    jobs.wait_nothing_left(job)
    # Nobody had to be killed: that would be KillWait seconds later, and leave things behind.
    assert "it is killed" not in jobs.output(job)


def test_what_slurm_refuses_is_said(jobs: Jobs):
    refused = jobs.verb("launch", "--partition", "none-such", check=False)
    assert refused.returncode == 1
    assert "sandboxd: slurm-error: sbatch:" in refused.stderr
    assert "invalid partition specified: none-such" in refused.stderr
    assert jobs.cluster.run(["squeue", "--noheader"]).stdout == ""
    unknown = jobs.verb("stop", "987654", check=False)
    assert unknown.returncode == 1
    assert "slurm-job-not-found" in unknown.stderr


def test_stop_removes_what_a_lost_batch_node_left(jobs: Jobs):
    where = jobs.directory / "987654"
    where.mkdir(mode=0o700, parents=True)
    lost = published.SlurmNode("987654", "node9", "http://127.0.0.1:1", "t" * 43)
    (where / "node9.json").write_text(json.dumps(lost.to_json()))
    (where / "node9.json").chmod(0o600)
    (told,) = json.loads(jobs.verb("status", "--json").stdout)
    assert (told["state"], told["nodes"][0]["state"]) == ("GONE", "node-unreachable")
    jobs.verb("stop", "987654")
    assert not where.exists()


def test_an_ordinary_user_launches_uses_and_stops(jobs: Jobs):
    """All of it as somebody who is root nowhere."""
    home = jobs.cluster.home / "nobody"
    home.mkdir(exist_ok=True)
    home.chmod(0o755)
    os.chown(home, NOBODY, NOBODY)
    words = ("--directory", str(home))
    launched = jobs.verb(
        "launch", "--json", *words, "--sbatch", f"--chdir={home}", user=NOBODY, check=False
    )
    assert launched.returncode == 0, launched.stderr
    (told,) = json.loads(launched.stdout)
    job = str(told["job"])
    (found,) = published.nodes(job, home)
    file = home / job / f"{found.node}.json"
    assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (NOBODY, 0o600)
    with Client.from_slurm(found.node, job=job, directory=home, retry_s=0) as client:
        node = client.node()
        assert (node.mode, node.ids, node.cgroup) == ("rootless", "range", "watchdog")
        with client.create("busybox") as box:
            assert box.exec(["id", "-u"]).stdout == "0\n"
            assert box.exec(["id", "-u"], user="agent").stdout == "1000\n"
    # That there is something to be left.
    instances = list(Path("/tmp").glob(f"sandboxd-slurm-{NOBODY}-{job}-*"))
    assert len(instances) == 1
    assert jobs.processes()
    jobs.verb("stop", *words, job, user=NOBODY)
    wait_for(lambda: not instances[0].exists(), lambda: f"{instances[0]} is still there")
    wait_for(lambda: not jobs.processes(), lambda: f"still there: {jobs.processes()}")
    assert [path.name for path in home.iterdir() if path.is_dir()] == []
