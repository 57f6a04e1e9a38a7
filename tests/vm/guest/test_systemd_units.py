"""The units of deploy/systemd under a real systemd: only inside the virtual machine.

In the order in which an operator meets it: installed, started, used, restarted, crashed, stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.framework import images, times
from tests.framework.images import REPOSITORY

UNITS = ("sandboxd-node.service", "sandboxd.socket", "sandboxd.service")
ADDRESS = "http://127.0.0.1:8642"
CGROUP = Path("/sys/fs/cgroup/system.slice/sandboxd-node.service")
MIB = 1024 * 1024


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def show(unit: str, key: str) -> str:
    return run("systemctl", "show", "--value", f"--property={key}", unit).strip()


def until(holds, what: str) -> None:
    """systemd tells nobody here; so look again, up to a deadline that only a hang reaches."""
    deadline = time.monotonic() + times.scaled(60)
    while not holds():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.1)


def install(clone: Path) -> None:
    """Wherever it lies: one below /tmp, which is refused, has another name here, and the API gets
    to see it. The units' time-outs are those of an ordinary machine."""
    scripts = clone
    if clone.is_relative_to("/tmp") or clone.is_relative_to("/var/tmp"):
        scripts = Path("/opt/clone")
        scripts.mkdir(exist_ok=True)
        run("mount", "--bind", str(clone), str(scripts))
    run(str(scripts / "deploy/systemd/install"))
    start_s, watchdog_s = times.scaled(90), times.scaled(30)
    drop_ins = {
        "sandboxd-node.service": f"TimeoutStartSec={start_s}\n",
        "sandboxd.service": f"TimeoutStartSec={start_s}\nWatchdogSec={watchdog_s}\n"
        f"BindReadOnlyPaths={clone}\n",
    }
    for unit, text in drop_ins.items():
        drop_in = Path(f"/run/systemd/system/{unit}.d/test.conf")
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        drop_in.write_text(f"[Service]\n{text}")
    run("systemctl", "daemon-reload")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """Both services running, and a client of the API."""
    install(REPOSITORY)
    directory = Path("/var/lib/sandboxd/images")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "busybox.sif").write_bytes(images.busybox_image().read_bytes())
    run("systemctl", "start", *UNITS)
    token = Path("/var/lib/sandboxd/token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=ADDRESS, headers=headers, timeout=times.scaled(60)) as client:
        yield client
    run("systemctl", "stop", *reversed(UNITS))
    for unit in UNITS:
        run("systemctl", "disable", unit)


def create(http: httpx.Client, **spec: object) -> str:
    answer = http.post("/v1/sandboxes", json={"image": "busybox", **spec})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def execute(http: httpx.Client, sandbox: str, command: str, **more: object) -> dict:
    body = {"command": command, "timeout_s": times.scaled(20), **more}
    answer = http.post(f"/v1/sandboxes/{sandbox}/exec", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_both_serve_and_the_api_is_not_root(http: httpx.Client) -> None:
    assert [show(unit, "ActiveState") for unit in UNITS] == ["active"] * 3
    status = Path(f"/proc/{show('sandboxd.service', 'MainPID')}/status").read_text()
    (uids,) = [line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")]
    assert "0" not in uids
    assert http.get("/v1/node").json()["features"]["limits"]["memory"] == "enforced"


def test_limits_are_in_the_delegated_tree(http: httpx.Client) -> None:
    """As the kernel has them, in the unit's own cgroup and nowhere else."""
    limits = {"memory_mb": 64, "disk_mb": 16, "pids": 50, "cpus": 0.5}
    sandbox = create(http, limits=limits)
    try:
        (group,) = [path.parent for path in CGROUP.rglob("pids.max") if path.read_text() == "51\n"]
        assert (group / "cpu.max").read_text() == "50000 100000\n"
        assert int((group / "memory.max").read_text()) == (64 + 16 + 16) * MIB
        assert (group / "memory.swap.max").read_text() == "0\n"
        forks = "i=0; while [ $i -lt 80 ]; do sleep 60 & i=$((i+1)); done"
        assert "can't fork" in execute(http, sandbox, forks)["stderr"]
        killed = execute(http, sandbox, "dd if=/dev/zero of=/dev/null bs=200M count=1")
        assert (killed["exit_code"], killed["oom_killed"]) == (137, True)
        assert execute(http, sandbox, "echo alive")["stdout"] == "alive\n"
    finally:
        http.delete(f"/v1/sandboxes/{sandbox}")


def test_no_process_stands_in_the_units_own_group(http: httpx.Client) -> None:
    """cgroup v2's rule for a group that hands its controllers on, and systemd's for Delegate=."""
    assert (CGROUP / "cgroup.procs").read_text() == ""
    assert {"cpu", "memory", "pids"} <= set((CGROUP / "cgroup.subtree_control").read_text().split())
    assert (CGROUP / "supervisor/cgroup.procs").read_text().split() == [
        show("sandboxd-node.service", "MainPID")
    ]


def test_a_restart_of_the_api_keeps_sandboxes_and_what_runs_in_them(http: httpx.Client) -> None:
    sandbox = create(http)
    started = http.post(
        f"/v1/sandboxes/{sandbox}/processes", json={"command": "while :; do date; sleep 1; done"}
    )
    assert started.is_success, started.text
    execute(http, sandbox, "echo kept > /work/f")
    before = show("sandboxd.service", "MainPID")
    run("systemctl", "restart", "sandboxd.service")
    assert show("sandboxd.service", "MainPID") != before
    assert execute(http, sandbox, "cat /work/f")["stdout"] == "kept\n"
    (process,) = http.get(f"/v1/sandboxes/{sandbox}/processes").json()["processes"]
    assert process["state"] == "running"
    http.delete(f"/v1/sandboxes/{sandbox}")


def test_a_crash_of_the_api_is_over_by_itself(http: httpx.Client) -> None:
    sandbox = create(http)
    before = int(show("sandboxd.service", "MainPID"))
    os.kill(before, signal.SIGKILL)
    until(
        lambda: show("sandboxd.service", "MainPID") not in ("0", str(before)) and ready(http),
        "a new daemon",
    )
    assert execute(http, sandbox, "echo alive")["stdout"] == "alive\n"
    http.delete(f"/v1/sandboxes/{sandbox}")


def test_a_crash_of_the_node_is_over_by_itself_and_leaves_nothing(http: httpx.Client) -> None:
    sandbox = create(http)
    before = int(show("sandboxd-node.service", "MainPID"))
    os.kill(before, signal.SIGKILL)
    until(lambda: show("sandboxd-node.service", "MainPID") not in ("0", str(before)), "a new node")
    until(lambda: http.post("/v1/sandboxes", json={"image": "busybox"}).status_code == 201, "it")
    gone = http.get(f"/v1/sandboxes/{sandbox}")
    assert gone.status_code == 404 or gone.json()["state"] == "failed"


def test_the_journal_says_what_happened() -> None:
    lines = run("journalctl", "--unit=sandboxd-node.service", "--output=json", "--no-pager")
    messages = [json.loads(line).get("MESSAGE", "") for line in lines.splitlines()]
    assert any("Main process exited, code=killed, status=9/KILL" in text for text in messages)


def test_a_stop_ends_everything(http: httpx.Client) -> None:
    create(http)
    run("systemctl", "stop", "sandboxd.socket", "sandboxd.service", "sandboxd-node.service")
    assert not CGROUP.exists()
    assert [show(unit, "Result") for unit in UNITS] == ["success"] * 3
    assert run("losetup", "--list", "--noheadings") == ""
    assert "squashfuse" not in run("ps", "-eo", "comm")
