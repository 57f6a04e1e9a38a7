"""An ordinary user with few subordinate ids, or none: what sandboxes still do, and what is refused
by name."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.refusals import refusal
from tests.e2e.shell_sessions import session
from tests.framework import ordinary_user as framework
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck
from tests.framework.ordinary_user import FIRST_SUBID, UID, ordinary_user


@pytest.fixture(scope="module")
def single(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    with (
        ordinary_user(0) as user,
        framework.running_daemon(leak_check, {"busybox": busybox}, user) as daemon,
    ):
        daemon.warm_up("busybox")
        yield daemon


@pytest.fixture(scope="module")
def usual(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    """With the 65,536 ids that useradd(8) gives."""
    with (
        ordinary_user(65_536) as user,
        framework.running_daemon(leak_check, {"busybox": busybox}, user) as daemon,
    ):
        daemon.warm_up("busybox")
        yield daemon


# --- one id --------------------------------------------------------------------------------------


def test_one_id_is_told(single: Daemon) -> None:
    node = single.http.get("/v1/node").json()
    assert (node["mode"], node["ids"], node["features"]["ids"]) == ("rootless", "single", 1)


def test_every_process_is_the_user(single: Daemon) -> None:
    with single.sandbox("busybox") as name:
        single.exec(name, "sleep 300 &")
        ids = framework.host_ids(single)
        assert "sleep" in {name for name, _ in ids.values()}
        assert {uid for _, uid in ids.values()} == {UID}


def test_root_works_with_its_own_files(single: Daemon) -> None:
    with single.sandbox("busybox") as name:
        script = "mkdir -p /opt/x && echo new >/opt/x/f && rm /etc/passwd && cat /opt/x/f && id -u"
        answer = single.exec(name, script)
        assert (answer["exit_code"], answer["stdout"]) == (0, "new\n0\n"), answer
        url = f"/v1/sandboxes/{name}/files"
        assert single.http.put(url, params={"path": "/root/f"}, content=b"in").is_success
        assert single.http.get(url, params={"path": "/root/f"}).content == b"in"
        with session(single.http, name) as shell:
            shell.run("cd /opt/x")
            assert shell.out("cat f") == "new\n"
        assert single.http.post(f"/v1/sandboxes/{name}/reset").is_success
        assert single.exec(name, "ls /opt/x")["exit_code"] != 0


def test_a_terminal_is_given(single: Daemon) -> None:
    with single.sandbox("busybox") as name:
        answer = single.exec(name, "stty size", tty={"cols": 91, "rows": 27})
        assert answer["stdout"] == "27 91\r\n"


@pytest.mark.parametrize("user", ["agent", "1000", "0:5"])
def test_another_user_is_refused_by_name(single: Daemon, user: str) -> None:
    with single.sandbox("busybox") as name:
        answer = single.http.post(
            f"/v1/sandboxes/{name}/exec", json={"command": "true", "user": user}
        )
        refusal(answer, httpx.codes.UNPROCESSABLE_ENTITY, "user-not-mapped", "request")
        answer = single.http.put(
            f"/v1/sandboxes/{name}/files", params={"path": "/tmp/f", "user": user}, content=b""
        )
        refusal(answer, httpx.codes.UNPROCESSABLE_ENTITY, "user-not-mapped", "request")


def test_another_owner_is_refused(single: Daemon) -> None:
    with single.sandbox("busybox") as name:
        answer = single.exec(name, "touch /tmp/f; chown 5 /tmp/f")
        assert answer["exit_code"] != 0
        assert "Invalid argument" in answer["stderr"]
        answer = single.http.post(
            f"/v1/sandboxes/{name}/files/chown", json={"path": "/tmp/f", "owner": "5"}
        )
        refusal(answer, httpx.codes.UNPROCESSABLE_ENTITY, "user-not-mapped", "request")


def test_memory_and_processes_are_held(single: Daemon) -> None:
    with single.sandbox("busybox", limits={"memory_mb": 96, "pids": 20}) as name:
        answer = single.exec(name, 'a=$(head -c 300m /dev/zero | tr "\\0" x); sleep 60')
        assert (answer["signal"], answer["oom_killed"]) == (signal.SIGKILL, True)
        answer = single.exec(name, "for i in $(seq 40); do sleep 300 & done; wait", timeout_s=20)
        assert "can't fork" in answer["stderr"]
        assert single.http.get(f"/v1/sandboxes/{name}").json()["state"] == "running"


def test_pid_1_is_out_of_its_sandboxs_reach(single: Daemon) -> None:
    """Though it is the same user there."""
    with single.sandbox("busybox") as name:
        script = "kill -9 1; kill -STOP 1; for f in environ maps mem; do cat /proc/1/$f; done; "
        answer = single.exec(name, script + "echo 0 >/proc/1/oom_score_adj; echo on")
        assert answer["stdout"] == "on\n"
        assert answer["stderr"].count("ermission denied") == 4
        assert single.exec(name, "echo again")["stdout"] == "again\n"


# --- 65,536 ids ----------------------------------------------------------------------------------


def test_a_usual_range_is_a_range(usual: Daemon) -> None:
    node = usual.http.get("/v1/node").json()
    assert (node["ids"], node["features"]["ids"]) == ("range", 65_536)


def test_nobody_is_there_and_what_the_node_has_is_not(usual: Daemon) -> None:
    with usual.sandbox("busybox") as name:
        answer = usual.exec(name, "sleep 300 & id -u", user="65534")
        assert answer["stdout"] == "65534\n"
        answer = usual.exec(
            name, "touch /tmp/f && chown 65534:65532 /tmp/f && stat -c %u:%g /tmp/f"
        )
        assert answer["stdout"] == "65534:65532\n"
        sleepers = {uid for name, uid in framework.host_ids(usual).values() if name == "sleep"}
        assert sleepers == {FIRST_SUBID + 65_533}
        for missing in ("65533", "65535"):
            answer = usual.http.post(
                f"/v1/sandboxes/{name}/exec", json={"command": "true", "user": missing}
            )
            refusal(answer, httpx.codes.UNPROCESSABLE_ENTITY, "user-not-mapped", "request")
