"""`sandboxd serve` as an ordinary user in a cgroup that was given to him: kill, freeze and limits
as in service mode, as far as the controllers go that are there."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from sandboxd.linux import cgroup
from tests.e2e.background import Background
from tests.e2e.test_rootless import ended, running
from tests.framework import host_state, times
from tests.framework import ordinary_user as framework
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck
from tests.framework.ordinary_user import FIRST_SUBID, UID, OrdinaryUser, ordinary_user

NODE_ID = FIRST_SUBID + 65_536
RANGE, SINGLE = 65_538, 0
LIMITING = {"memory", "pids"}


@pytest.fixture(scope="module", params=[RANGE, SINGLE], ids=["range", "single"])
def user(request: pytest.FixtureRequest) -> Iterator[OrdinaryUser]:
    with ordinary_user(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def given(user: OrdinaryUser) -> Iterator[Path]:
    with framework.delegated_cgroup(user) as path:
        yield path


@pytest.fixture(scope="module")
def his(leak_check: LeakCheck, user: OrdinaryUser, given: Path, busybox: Path) -> Iterator[Daemon]:
    images = {"busybox": busybox}
    with framework.running_daemon(leak_check, images, user, cgroup=given) as daemon:
        daemon.warm_up("busybox")
        yield daemon


@pytest.fixture
def box(his: Daemon) -> Iterator[str]:
    with his.sandbox("busybox") as name:
        yield name


def controllers(given: Path) -> set[str]:
    return set((given / "cgroup.controllers").read_text().split())


def node_cgroup(given: Path) -> Path:
    (path,) = [one for one in given.iterdir() if one.is_dir() and (one / "node").is_dir()]
    return path


def owner(path: Path) -> int:
    return os.stat(path).st_uid


# --- what it is ----------------------------------------------------------------------------------


def test_the_node_says_what_holds(his: Daemon, given: Path) -> None:
    node = his.http.get("/v1/node").json()
    limits = controllers(given) >= LIMITING
    assert (node["mode"], node["cgroup"]) == ("rootless", "v2" if limits else "watchdog")
    held = "enforced" if limits else "watchdog"
    assert node["enforcement"]["memory_mb"] == node["enforcement"]["pids"] == held
    cpu = "enforced" if "cpu" in controllers(given) else "none"
    assert node["enforcement"]["cpus"] == node["features"]["limits"]["cpu"] == cpu
    assert node["features"]["cgroup_kill"] is True


def test_only_the_nodes_own_directory_is_the_nodes(
    his: Daemon, box: str, user: OrdinaryUser, given: Path
) -> None:
    single = his.http.get("/v1/node").json()["ids"] == "single"
    node_id = UID if single else NODE_ID
    path = node_cgroup(given)
    process = Background.start(his.http, box, ["sleep", "300"])
    (group,) = path.glob("s*/e*")
    assert len(cgroup.processes(group)) == 1
    for one in (path, path / "cgroup.procs", path / "cgroup.subtree_control", group, group.parent):
        assert owner(one) == node_id, one
    for one in (given, given / "cgroup.procs", path / "node", path / "cgroup.kill"):
        assert owner(one) == UID, one
    pids = cgroup.processes(path / "node")
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
    assert {"python", "sandbox_init"} <= names, "launcher and zygote"
    assert not stat.S_IMODE(os.stat(path).st_mode) & 0o022
    process.signal("SIGKILL", "tree")


# --- kill and freeze -----------------------------------------------------------------------------


def test_a_timeout_kills_the_whole_tree(his: Daemon, box: str) -> None:
    answer = his.exec(box, "setsid sh -c 'sleep 301 & sleep 302' & sleep 300", timeout_s=0.5)
    assert answer["timed_out"] is True
    assert running(his, box, "sleep") == 0


def test_a_background_process_is_killed_with_its_children(his: Daemon, box: str) -> None:
    process = Background.start(his.http, box, "setsid sleep 300 & sleep 301")
    other = Background.start(his.http, box, ["sleep", "302"])
    assert process.signal("SIGKILL", "tree").status_code == httpx.codes.NO_CONTENT
    assert process.wait()["signal"] == signal.SIGKILL
    assert running(his, box, "sleep") == 1
    assert other.get()["state"] == "running"


def test_what_runs_is_paused_and_goes_on(his: Daemon, box: str, given: Path) -> None:
    script = "i=0; while :; do i=$((i+1)); echo $i >/tmp/m; mv /tmp/m /tmp/n; done"
    process = Background.start(his.http, box, script)
    his.exec(box, "until [ -e /tmp/n ]; do :; done")
    url = f"/v1/sandboxes/{box}"
    assert his.http.post(f"{url}/pause").is_success
    (group,) = node_cgroup(given).glob("s*/e*")
    assert cgroup.read_keyed(group / "cgroup.events")["frozen"] == 1
    path = {"path": "/tmp/n"}
    seen = his.http.get(f"{url}/files", params=path).content
    assert his.http.get(f"{url}/files", params=path).content == seen
    assert his.http.post(f"{url}/resume").is_success
    later = his.exec(box, f"until [ $(cat /tmp/n) -gt {int(seen)} ]; do :; done")
    assert later["exit_code"] == 0
    process.signal("SIGKILL", "tree")


@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_a_command_has_the_sandbox_to_itself(his: Daemon, box: str, how: str) -> None:
    process = Background.start(his.http, box, ["sleep", "300"])
    body = {"command": "echo alone", "exclusive": how}
    answer = his.http.post(f"/v1/sandboxes/{box}/exec", json=body)
    assert answer.json()["stdout"] == "alone\n", answer.text
    assert running(his, box, "sleep") == int(how == "freeze")
    process.signal("SIGKILL", "tree")


def test_a_running_sandbox_is_copied(his: Daemon, box: str) -> None:
    his.exec(box, "echo kept >/tmp/f; sleep 300 &")
    url = f"/v1/sandboxes/{box}"
    answer = his.http.post(f"{url}/snapshots", json={"on_running": "copy"})
    assert answer.is_success, answer.text
    assert his.http.get(f"{url}/diff").is_success
    assert his.http.delete(f"/v1/snapshots/{answer.json()['id']}").is_success


# --- limits --------------------------------------------------------------------------------------


def test_too_much_memory_is_killed_and_said(his: Daemon) -> None:
    limits = {"memory_mb": 96, "disk_mb": 8}
    with his.sandbox("busybox", limits=limits) as name:
        answer = his.exec(name, 'a=$(head -c 300m /dev/zero | tr "\\0" x); sleep 60')
        assert (answer["signal"], answer["oom_killed"]) == (signal.SIGKILL, True)
        assert his.exec(name, "echo alive")["stdout"] == "alive\n"
        usage = his.http.get(f"/v1/sandboxes/{name}/stats").json()
        assert usage["memory"]["oom_kills"] >= 1
        assert usage["cpu"]["usage_s"] > 0


def test_more_processes_than_the_limit_are_refused(his: Daemon) -> None:
    with his.sandbox("busybox", limits={"pids": 20}) as name:
        answer = his.exec(name, "for i in $(seq 40); do sleep 300 & done; wait", timeout_s=20)
        assert "can't fork" in answer["stderr"]


def test_the_limits_are_in_the_kernels_own_files(his: Daemon, given: Path) -> None:
    """As far as there are any."""
    limits = {"memory_mb": 100, "disk_mb": 28, "pids": 20, "cpus": 0.5}
    with his.sandbox("busybox", limits=limits) as name:
        process = Background.start(his.http, name, ["sleep", "300"])
        (group,) = [one.parent for one in node_cgroup(given).glob("s*/e*")]
        expected = {"memory.max": str(144 << 20), "pids.max": "21", "cpu.max": "50000 100000"}
        have = controllers(given)
        if not have >= LIMITING:
            have -= LIMITING
        for file, value in expected.items():
            if file.partition(".")[0] in have:
                assert (group / file).read_text().strip() == value
            else:
                assert not (group / file).exists()
        process.signal("SIGKILL", "tree")


if cgroup.layout().v2_controllers >= LIMITING:  # else nothing is there to hold

    def test_limits_of_all_by_several_users_are_held(his: Daemon, given: Path) -> None:
        with his.sandbox("busybox", limits={"pids": 20}) as name:
            script = "for i in $(seq 15); do setsid sleep 300 & done"
            if his.http.get("/v1/node").json()["ids"] == "single":
                body = {"command": script, "user": "1001"}
                answer = his.http.post(f"/v1/sandboxes/{name}/exec", json=body)
                assert answer.json()["error"]["code"] == "user-not-mapped"
                return
            first, second = (
                his.exec(name, script, user=user, timeout_s=20) for user in ("1001", "1002")
            )
            assert "can't fork" not in first["stderr"]  # positive control: one alone is below it
            assert "can't fork" in second["stderr"]
            assert his.http.get(f"/v1/sandboxes/{name}").json()["state"] == "running"
            counts = [int(one.read_text()) for one in node_cgroup(given).glob("s*/pids.current")]
            assert 15 < max(counts) <= 21  # PID 1 is counted too


# --- its start and its end -----------------------------------------------------------------------


def test_nothing_is_left_by_a_daemon_that_ends(
    leak_check: LeakCheck, user: OrdinaryUser, busybox: Path
) -> None:
    with framework.delegated_cgroup(user) as given:
        images = {"busybox": busybox}
        with framework.running_daemon(leak_check, images, user, cgroup=given) as daemon:
            daemon.exec(daemon.create("busybox"), "setsid sleep 300 &")
            assert node_cgroup(given)
        left = {one.name for one in given.iterdir() if one.is_dir()}
        assert left <= {"supervisor"}


def test_what_a_killed_daemon_leaves_the_next_removes(
    leak_check: LeakCheck, user: OrdinaryUser, busybox: Path
) -> None:
    """Also where that one is started in another cgroup."""
    with framework.delegated_cgroup(user) as first, framework.delegated_cgroup(user) as second:
        images = {"busybox": busybox}
        with framework.running_daemon(leak_check, images, user, cgroup=first) as daemon:
            daemon.exec(daemon.create("busybox"), "setsid sleep 300 &")
            daemon.refresh_family()
            pids = daemon.family
            # All at once, and nobody is left to remove anything; an exec may end meanwhile.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
            daemon.process.wait()
            ended(daemon)
            assert list(node_cgroup(first).glob("s*")), "positive control: something is left"
            again = framework.start(user, daemon.state_dir.parent, cgroup=second)
            try:
                again.wait_ready()
                assert not list(first.glob("*/node"))
                with again.sandbox("busybox") as name:
                    assert again.exec(name, "echo again")["stdout"] == "again\n"
                assert node_cgroup(second)
            finally:
                again.stop()


def test_a_node_that_lost_its_launcher_starts_anew(
    leak_check: LeakCheck, user: OrdinaryUser, busybox: Path
) -> None:
    images = {"busybox": busybox}
    with (
        framework.delegated_cgroup(user) as given,
        framework.running_daemon(leak_check, images, user, cgroup=given) as daemon,
    ):
        name = daemon.create("busybox")
        owned_by = owner(node_cgroup(given))
        table = host_state.process_table()
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in daemon.refresh_family()}
        (hostd,) = [pid for pid, line in words.items() if b"sandboxd.host\0" in line]
        (launcher,) = [
            process.pid
            for process in table[hostd].children
            if b"sandboxd.launcher\0" in words.get(process.pid, b"")
        ]
        os.kill(launcher, signal.SIGKILL)
        deadline = time.monotonic() + times.scaled(20)
        while daemon.http.get(f"/v1/sandboxes/{name}").json().get("state") != "failed":
            assert time.monotonic() < deadline, daemon.log_tail()
            time.sleep(0.05)
        daemon.wait_ready()
        with daemon.sandbox("busybox") as name:
            assert daemon.exec(name, "echo again")["stdout"] == "again\n"
        assert owner(node_cgroup(given)) == owned_by


def test_doctor_tells_what_this_user_gets(user: OrdinaryUser, given: Path) -> None:
    with_it = user.sandboxd("doctor", cgroup=given)
    without = user.sandboxd("doctor")
    assert with_it.returncode == without.returncode == 0, with_it.stdout
    limits = "held by cgroup v2, delegated" if controllers(given) >= LIMITING else "not all of"
    assert limits in with_it.stdout
    assert "born in and killed through" in with_it.stdout
    assert "no cgroups for this user" in without.stdout
