"""The units of `deploy/systemd` under a real systemd: start, use, restart, crash, reload, stop.

For a machine whose systemd is PID 1 and which is there for tests alone: the units are installed,
and a node runs with the default directories.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.host_processes import new_marker, pids_with, status_of, wait_for, wait_for_marker
from tests.framework import host_state

REPOSITORY = Path(__file__).resolve().parents[3]
URL = "http://127.0.0.1:8642"
STATE = Path("/var/lib/sandboxd")
CONFIG = Path("/etc/sandboxd/sandboxd.toml")
NODE, API, SOCKET = "sandboxd-node.service", "sandboxd.service", "sandboxd.socket"

pytestmark = [
    pytest.mark.skipif(
        not Path("/run/systemd/system").is_dir(), reason="systemd is not PID 1 here"
    ),
    pytest.mark.timeout(300),
]


def systemctl(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        log = journal("-n", "60")
        raise AssertionError(f"systemctl {' '.join(arguments)}: {done.stderr}\n{log}")
    return done.stdout.strip()


def journal(*arguments: str) -> str:
    command = ["journalctl", "--no-pager", "-o", "cat", "-u", NODE, "-u", API, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def shown(unit: str, name: str) -> str:
    return systemctl("show", "--value", "-p", name, unit)


def main_pid(unit: str) -> int:
    return int(shown(unit, "MainPID"))


@pytest.fixture(scope="module")
def installed(busybox: Path) -> Iterator[None]:
    subprocess.run([REPOSITORY / "deploy/systemd/install"], check=True)
    (STATE / "images").mkdir(parents=True, exist_ok=True)
    for directory in (STATE, STATE / "images"):
        shutil.chown(directory, "sandboxd", "sandboxd")
        directory.chmod(0o755)
    shutil.copyfile(busybox, STATE / "images/busybox.sif")
    (STATE / "images/busybox.sif").chmod(0o444)
    yield
    systemctl("stop", SOCKET, API, NODE, check=False)
    systemctl("reset-failed", SOCKET, API, NODE, check=False)
    for unit in (NODE, API, SOCKET):
        Path("/etc/systemd/system", unit).unlink()
    Path("/usr/local/bin/sandboxd").unlink()
    shutil.rmtree(CONFIG.parent)
    shutil.rmtree(STATE)
    shutil.rmtree("/run/sandboxd", ignore_errors=True)
    systemctl("daemon-reload")


@pytest.fixture
def api(installed: None) -> Iterator[httpx.Client]:
    """Both services, started; a client of the API. All sandboxes are deleted afterwards."""
    systemctl("start", NODE, SOCKET, API)
    token = (STATE / "token").read_text().strip()
    with httpx.Client(base_url=URL, timeout=120) as client:
        client.headers["Authorization"] = f"Bearer {token}"
        yield client
    # Another connection: the test may have broken that one's other end.
    systemctl("start", NODE, SOCKET, API)
    with httpx.Client(base_url=URL, timeout=120) as client:
        client.headers["Authorization"] = f"Bearer {token}"
        for sandbox in client.get("/v1/sandboxes").json()["sandboxes"]:
            assert client.delete(f"/v1/sandboxes/{sandbox['id']}").is_success


def create(api: httpx.Client, **spec: object) -> str:
    answer = api.post("/v1/sandboxes", json={"image": "busybox", **spec})
    assert answer.status_code == 201, answer.text + journal("-n", "60")
    return str(answer.json()["id"])


def execute(api: httpx.Client, sandbox: str, command: str) -> dict[str, object]:
    answer = api.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": command})
    assert answer.status_code == 200, answer.text
    result: dict[str, object] = answer.json()
    return result


def test_the_services_start_and_serve(api: httpx.Client):
    assert shown(NODE, "ActiveState") == shown(API, "ActiveState") == "active"
    assert "all sandboxes are known" in shown(API, "StatusText")
    # The API is the account, without a right of root's; the node is root.
    status = status_of(main_pid(API))
    assert status["Uid"].split()[0] != "0"
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status_of(main_pid(NODE))["Uid"].split()[0] == "0"
    sandbox = create(api)
    assert execute(api, sandbox, "echo $((6 * 7))")["stdout"] == "42\n"


def test_sandboxes_stand_in_the_delegated_tree_with_their_limits(api: httpx.Client):
    marker = new_marker()
    sandbox = create(api, limits={"memory_mb": 200, "pids": 99})
    execute(api, sandbox, f"setsid sleep {marker} & true")
    (pid,) = pids_with(marker)
    unit = shown(NODE, "ControlGroup")
    (line,) = (
        line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line[:3] == "0::"
    )
    group = line[3:]
    assert group.startswith(unit + "/"), (group, unit)
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        own = Path("/sys/fs/cgroup" + group)
        limits = next(p for p in (own, *own.parents) if (p / "pids.max").read_text() == "99\n")
        assert int((limits / "memory.max").read_text()) >= 200 << 20
    # hostd made room for them.
    hostd = Path(f"/proc/{main_pid(NODE)}/cgroup").read_text()
    assert f"{unit}/supervisor\n" in hostd
    # The node is spared by the OOM killer; a sandbox's commands are not.
    assert Path(f"/proc/{main_pid(NODE)}/oom_score_adj").read_text() == "-900\n"
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 0
    # No mount of the host is hidden from the node.
    assert os.readlink(f"/proc/{main_pid(NODE)}/ns/mnt") == os.readlink("/proc/1/ns/mnt")


def test_an_oom_kill_in_a_sandbox_is_not_the_end_of_the_node(api: httpx.Client):
    sandbox = create(api, limits={"memory_mb": 32, "disk_mb": 16})
    before = main_pid(NODE)
    result = execute(api, sandbox, "tail -c 500m /dev/zero | tail -c 400m | wc -c")
    other = create(api)
    assert execute(api, other, "echo alive")["stdout"] == "alive\n"
    assert (main_pid(NODE), shown(NODE, "ActiveState")) == (before, "active"), result


@pytest.mark.parametrize("how", ["restart", "crash"])
def test_a_restart_of_the_api_leaves_the_sandboxes(api: httpx.Client, how: str):
    sandbox = create(api)
    marker = new_marker()
    execute(api, sandbox, f"echo kept > /root/file; setsid sleep {marker} & true")
    node, old = main_pid(NODE), main_pid(API)
    if how == "restart":
        systemctl("restart", API)
    else:
        os.kill(old, signal.SIGKILL)
    # Asked while there may be nobody: it waits in the socket.
    with httpx.Client(base_url=URL, timeout=120, headers=api.headers) as later:
        assert execute(later, sandbox, "cat /root/file")["stdout"] == "kept\n"
        assert main_pid(API) not in (0, old)
        assert main_pid(NODE) == node
        assert len(pids_with(marker)) == 1


def test_the_watchdog_ends_an_api_that_hangs(api: httpx.Client):
    sandbox = create(api)
    drop_in = Path("/run/systemd/system/sandboxd.service.d")
    drop_in.mkdir(parents=True)
    try:
        (drop_in / "short.conf").write_text("[Service]\nWatchdogSec=2\n")
        systemctl("daemon-reload")
        systemctl("restart", API)
        old = main_pid(API)
        os.kill(old, signal.SIGSTOP)
        wait_for(lambda: main_pid(API) not in (0, old), "another daemon")
        with httpx.Client(base_url=URL, timeout=120, headers=api.headers) as later:
            assert execute(later, sandbox, "echo alive")["stdout"] == "alive\n"
    finally:
        shutil.rmtree(drop_in)
        systemctl("daemon-reload")
        systemctl("restart", API)


def test_a_reload_says_what_is_wrong_with_its_line(api: httpx.Client):
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


def test_a_killed_node_is_started_anew_and_leaves_nothing(api: httpx.Client):
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


def test_stopping_the_node_ends_everything(api: httpx.Client):
    sandbox = create(api)
    marker = new_marker()
    execute(api, sandbox, f"trap '' TERM; setsid sleep {marker} & true")
    wait_for_marker(marker)
    group = Path("/sys/fs/cgroup" + shown(NODE, "ControlGroup"))
    systemctl("stop", NODE)
    assert pids_with(marker) == []
    assert shown(NODE, "Result") == "success"
    assert not group.exists()
    assert not [one for one in host_state.process_table().values() if "squashfuse" in one.name]
    # The API says by name what is missing, and serves again by itself.
    answer = api.post("/v1/sandboxes", json={"image": "busybox"})
    assert answer.json()["error"]["code"] == "node-unavailable", answer.text
    systemctl("start", NODE)
    wait_for(lambda: api.get("/readyz").status_code == 200, "the daemon's connection")
    assert execute(api, create(api), "echo alive")["stdout"] == "alive\n"
