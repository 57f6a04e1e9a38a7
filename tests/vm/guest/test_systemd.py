"""The units of `deploy/systemd` under a real systemd: start, use, restart, crash, reload, stop.

In the order in which an operator meets it. The node runs with the default directories.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.host_processes import new_marker, pids_with, status_of, wait_for, wait_for_marker
from tests.framework import times
from tests.framework.internet import DNS, EVIL, GOOD, Internet
from tests.vm.guest.units import (
    API,
    CGROUP,
    CONFIG,
    NODE,
    SOCKET,
    client,
    create,
    execute,
    journal,
    left_on_host,
    main_pid,
    shown,
    systemctl,
)

MIB = 1 << 20

pytestmark = pytest.mark.timeout(300)


def test_the_services_start_and_serve(api: httpx.Client) -> None:
    assert [shown(unit, "ActiveState") for unit in (NODE, API, SOCKET)] == ["active"] * 3
    assert "all sandboxes are known" in shown(API, "StatusText")
    # The API is the account, without a right of root's; the node is root.
    status = status_of(main_pid(API))
    assert "0" not in status["Uid"].split()
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status_of(main_pid(NODE))["Uid"].split()[0] == "0"
    assert set(api.get("/v1/node").json()["enforcement"].values()) == {"enforced"}
    sandbox = create(api)
    assert execute(api, sandbox, "echo $((6 * 7))")["stdout"] == "42\n"


def test_no_process_stands_in_the_units_own_group(api: httpx.Client) -> None:
    """cgroup v2's rule for a group that hands its controllers on, and systemd's for Delegate=."""
    assert shown(NODE, "ControlGroup") == f"/{CGROUP.relative_to('/sys/fs/cgroup')}"
    assert (CGROUP / "cgroup.procs").read_text() == ""
    assert {"cpu", "memory", "pids"} <= set((CGROUP / "cgroup.subtree_control").read_text().split())
    supervisor = set((CGROUP / "supervisor/cgroup.procs").read_text().split())
    main = str(main_pid(NODE))
    assert main in supervisor
    # hostd, and the guard that ends it where it hangs.
    assert {status_of(int(pid))["PPid"] for pid in supervisor - {main}} <= {main}


def test_sandboxes_stand_in_the_delegated_tree_with_their_limits(api: httpx.Client) -> None:
    """As the kernel has them, in the unit's own cgroup and nowhere else; and they hold."""
    marker = new_marker()
    limits = {"memory_mb": 64, "disk_mb": 16, "pids": 50, "cpus": 0.5}
    sandbox = create(api, limits=limits)
    execute(api, sandbox, f"setsid sleep {marker} & true")
    (pid,) = pids_with(marker)
    (line,) = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    own = Path("/sys/fs/cgroup" + line.removeprefix("0::"))
    assert own.is_relative_to(CGROUP)
    # PID 1 is one more.
    (group,) = [one for one in (own, *own.parents) if _read(one / "pids.max") == "51\n"]
    assert _read(group / "cpu.max") == "50000 100000\n"
    assert _read(group / "memory.max") == f"{(64 + 16 + 16) * MIB}\n"
    assert _read(group / "memory.swap.max") == "0\n"
    # The node is spared by the OOM killer; a sandbox's commands are not.
    assert _read(Path(f"/proc/{main_pid(NODE)}/oom_score_adj")) == "-900\n"
    assert int(_read(Path(f"/proc/{pid}/oom_score_adj"))) >= 500
    # No mount of the host is hidden from the node.
    assert os.readlink(f"/proc/{main_pid(NODE)}/ns/mnt") == os.readlink("/proc/1/ns/mnt")
    forks = "i=0; while [ $i -lt 80 ]; do sleep 60 & i=$((i+1)); done"
    assert "can't fork" in str(execute(api, sandbox, forks)["stderr"])


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_an_oom_kill_in_a_sandbox_is_not_the_end_of_the_node(api: httpx.Client) -> None:
    sandbox = create(api, limits={"memory_mb": 64, "disk_mb": 16})
    before = main_pid(NODE)
    killed = execute(api, sandbox, "dd if=/dev/zero of=/dev/null bs=200M count=1")
    assert (killed["exit_code"], killed["oom_killed"]) == (137, True)
    assert execute(api, sandbox, "echo alive")["stdout"] == "alive\n"
    assert (main_pid(NODE), shown(NODE, "ActiveState")) == (before, "active")


def test_a_sandbox_has_the_network_that_it_is_allowed_and_no_more(
    api: httpx.Client, world: Internet
) -> None:
    box = create(api, network={"allow": ["example.org:80"]})

    def said(address: str, port: int) -> str:
        script = f"nc -w 3 {address} {port} </dev/null | head -n 1"
        return str(execute(api, box, script)["stdout"])

    world.queries()
    assert said(GOOD, 80) == "", "nobody has asked for the name yet"
    assert GOOD in str(execute(api, box, "nslookup -type=a example.org")["stdout"])
    assert said(GOOD, 80) == f"{GOOD}:80\n"
    for address, port in ((GOOD, 443), (EVIL, 80), (DNS, 53), ("127.0.0.1", 8642)):
        assert said(address, port) == ""
    assert execute(api, box, "nslookup -type=a evil.test")["exit_code"] != 0
    assert world.queries() == ["example.org"]


@pytest.mark.parametrize("how", ["restart", "crash"])
def test_the_api_comes_and_goes_and_leaves_the_sandboxes(api: httpx.Client, how: str) -> None:
    sandbox = create(api)
    marker = new_marker()
    execute(api, sandbox, f"echo kept > /root/file; setsid sleep {marker} & true")
    command = {"command": "while :; do date; sleep 1; done"}
    assert api.post(f"/v1/sandboxes/{sandbox}/processes", json=command).is_success
    node, old = main_pid(NODE), main_pid(API)
    if how == "restart":
        systemctl("restart", API)
    else:
        os.kill(old, signal.SIGKILL)
    # Asked while there may be nobody: it waits in the socket.
    with client() as later:
        assert execute(later, sandbox, "cat /root/file")["stdout"] == "kept\n"
        (process,) = later.get(f"/v1/sandboxes/{sandbox}/processes").json()["processes"]
    assert process["state"] == "running"
    assert main_pid(API) not in (0, old)
    assert main_pid(NODE) == node
    assert len(pids_with(marker)) == 1


def test_the_watchdog_ends_an_api_that_hangs(api: httpx.Client) -> None:
    sandbox = create(api)
    drop_in = Path("/run/systemd/system/sandboxd.service.d/watchdog.conf")
    try:
        drop_in.write_text(f"[Service]\nWatchdogSec={max(2, times.scaled(0.5))}\n")
        systemctl("daemon-reload")
        systemctl("restart", API)
        old = main_pid(API)
        os.kill(old, signal.SIGSTOP)
        wait_for(lambda: main_pid(API) not in (0, old), "another daemon")
        with client() as later:
            assert execute(later, sandbox, "echo alive")["stdout"] == "alive\n"
    finally:
        drop_in.unlink()
        systemctl("daemon-reload")
        systemctl("restart", API)


def test_a_reload_says_what_is_wrong_with_its_line(api: httpx.Client) -> None:
    text = CONFIG.read_text()
    try:
        CONFIG.write_text(text.replace("max_sandboxes = 512", "max_sandboxes = 511"))
        systemctl("reload", API)
        assert api.get("/v1/node").json()["max_sandboxes"] == 511
        CONFIG.write_text("\nmax_sandbox = 3\n")
        with pytest.raises(AssertionError, match=rf"{CONFIG}:2: unknown key 'max_sandbox'"):
            systemctl("reload", API)
        assert api.get("/v1/node").json()["max_sandboxes"] == 511
    finally:
        CONFIG.write_text(text)
        systemctl("reload", API)


def test_a_killed_node_is_started_anew_and_leaves_nothing(api: httpx.Client) -> None:
    sandbox = create(api)
    marker = new_marker()
    execute(api, sandbox, f"setsid sleep {marker} & true")
    old = main_pid(NODE)
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: main_pid(NODE) not in (0, old), "another node")
    wait_for(lambda: shown(NODE, "ActiveState") == "active", "its readiness")
    assert pids_with(marker) == []
    wait_for(lambda: api.get("/readyz").status_code == 200, "the daemon's connection")
    seen = api.get(f"/v1/sandboxes/{sandbox}").json()
    assert (seen["state"], seen["failure"]["code"]) == ("failed", "sandbox-lost")
    fresh = create(api)
    assert execute(api, fresh, "echo alive")["stdout"] == "alive\n"
    lines = journal("-o", "json", "--unit", NODE).splitlines()
    messages = [json.loads(line).get("MESSAGE", "") for line in lines]
    assert any("Main process exited, code=killed, status=9/KILL" in text for text in messages)


def test_stopping_the_node_ends_everything(
    api: httpx.Client, host_before: dict[str, set[str]]
) -> None:
    """The host is as it was before the units were installed, too."""
    sandbox = create(api, network={"allow": []})
    marker = new_marker()
    execute(api, sandbox, f"trap '' TERM; setsid sleep {marker} & true")
    wait_for_marker(marker)
    systemctl("stop", NODE)
    assert pids_with(marker) == []
    assert shown(NODE, "Result") == "success"
    # The API says by name what is missing, and serves again by itself.
    answer = api.post("/v1/sandboxes", json={"image": "busybox"})
    assert answer.json()["error"]["code"] == "node-unavailable", answer.text
    systemctl("start", NODE)
    wait_for(lambda: api.get("/readyz").status_code == 200, "the daemon's connection")
    assert execute(api, create(api), "echo alive")["stdout"] == "alive\n"
    systemctl("stop", SOCKET, API, NODE)
    assert [shown(unit, "Result") for unit in (NODE, API, SOCKET)] == ["success"] * 3
    # The kernel takes links away some time after their namespace's last process. What stays is said
    # below, and not that the wait was in vain.
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not left_on_host(host_before), "an empty host", times.scaled(5))
    assert left_on_host(host_before) == {}
