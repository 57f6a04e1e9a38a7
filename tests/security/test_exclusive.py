"""A command that has the sandbox to itself is neither raced nor watched by what ran there before.

`probe/rival.c` is a policy that tries, in every way we know to live on unseen; its judge is run as
another user, and as the policy's own. The control is the same judge without `exclusive`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.at_once import client_of, in_background
from tests.e2e.restarts import running_node
from tests.framework import times
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck
from tests.security.probing import alive, build, put

RIVALS = ("respawn", "daemon", "tracer", "watcher", "stopped", "waiting", "storm")
SLEEPER = "echo up > /tmp/sleeper; exec sleep 1000"


@pytest.fixture(scope="module")
def rival(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("rival", tmp_path_factory.mktemp("rival"))


@pytest.fixture
def arena(daemon: Daemon, rival: Path) -> Iterator[str]:
    """A sandbox in which the policy (`agent`) has all its rivals at work: some 35 processes."""
    with daemon.sandbox("busybox", limits={"pids": 96, "cpus": 1}) as sandbox:
        put(daemon, sandbox, "/bin/rival", rival.read_bytes(), mode="0755")
        daemon.exec(sandbox, "mkdir -m 777 /judge; touch /judge/secret")
        for name in RIVALS:
            daemon.exec(sandbox, ["/bin/rival", name], user="agent", timeout_s=times.scaled(60))
        all_move(daemon, sandbox)
        yield sandbox


def all_move(daemon: Daemon, sandbox: str) -> None:
    """Returns once each rival has been seen to move, but for the watcher, which counts others."""
    moving = daemon.exec(sandbox, ["/bin/rival", "moving"], timeout_s=times.scaled(100))
    assert moving["exit_code"] == 0, moving


def judged(daemon: Daemon, sandbox: str, user: str, **options: Any) -> tuple[int, int, int]:
    """How many other processes the judge saw, how many rivals moved meanwhile, who traced it."""
    answer = daemon.exec(
        sandbox, ["/bin/rival", "judge"], user=user, timeout_s=times.scaled(60), **options
    )
    others, moved, tracer = map(int, answer["stdout"].split())
    return others, moved, tracer


@pytest.mark.parametrize("user", ["root", "agent"])
def test_killed_rivals_are_gone(daemon: Daemon, arena: str, user: str) -> None:
    assert judged(daemon, arena, user, exclusive=True) == (0, 0, 0)
    assert judged(daemon, arena, user)[:2] == (0, 0)


@pytest.mark.parametrize("user", ["root", "agent"])
def test_frozen_rivals_stand_still_and_go_on(daemon: Daemon, arena: str, user: str) -> None:
    others, moved, tracer = judged(daemon, arena, user, exclusive="freeze")
    assert others >= len(RIVALS)
    assert (moved, tracer) == (0, 0)
    all_move(daemon, arena)


def test_a_flood_that_holds_every_process_there_is(daemon: Daemon, rival: Path) -> None:
    with daemon.sandbox("busybox", limits={"pids": 32}) as sandbox:
        url = f"/v1/sandboxes/{sandbox}"
        put(daemon, sandbox, "/bin/rival", rival.read_bytes(), mode="0755")
        flood = {"command": ["/bin/rival", "flood"], "user": "agent"}
        assert daemon.http.post(f"{url}/processes", json=flood).is_success
        deadline = time.monotonic() + times.scaled(60)
        while not daemon.http.get(f"{url}/stats").json()["pids"]["refused"]:
            assert time.monotonic() < deadline
        # Frozen it keeps its places: told as its doing. Killed it has none.
        body = {"command": ["/bin/rival", "judge"], "exclusive": "freeze"}
        refused = daemon.http.post(f"{url}/exec", json=body).json()["error"]
        assert (refused["code"], refused["cause"]) == ("pids-exhausted", "workload")
        assert judged(daemon, sandbox, "root", exclusive="kill") == (0, 0, 0)


def test_control_the_tracer_traces_its_own_user(daemon: Daemon, rival: Path) -> None:
    with daemon.sandbox("busybox") as sandbox:
        put(daemon, sandbox, "/bin/rival", rival.read_bytes(), mode="0755")
        daemon.exec(sandbox, ["/bin/rival", "tracer"], user="agent")
        deadline = time.monotonic() + times.scaled(60)
        while judged(daemon, sandbox, "agent")[2] == 0:
            assert time.monotonic() < deadline
        assert judged(daemon, sandbox, "agent", exclusive="freeze")[2] == 0
        assert judged(daemon, sandbox, "agent", exclusive="kill")[2] == 0


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_what_is_under_way_is_ended_or_waits(daemon: Daemon, how: str) -> None:
    with daemon.sandbox("busybox") as sandbox:
        url = f"/v1/sandboxes/{sandbox}"
        process = daemon.http.post(f"{url}/processes", json={"command": SLEEPER}).json()
        session = daemon.http.post(f"{url}/sessions", json={}).json()

        def slow() -> dict[str, Any]:
            with client_of(daemon) as client:
                body = {"command": "touch /tmp/slow; sleep 2"}
                return dict(client.post(f"{url}/exec", json=body).json())

        with in_background(slow) as running:
            wait_for(daemon, sandbox, "/tmp/slow")
            wait_for(daemon, sandbox, "/tmp/sleeper")
            alone = daemon.exec(sandbox, ["/bin/echo", "verdict"], exclusive=how)
            assert (alone["exit_code"], alone["stdout"]) == (0, "verdict\n")
            ended = running.result()
        told = daemon.http.get(f"{url}/processes/{process['id']}").json()
        spoken = daemon.http.post(
            f"{url}/sessions/{session['id']}/exec", json={"command": "echo 1"}
        )
        if how == "kill":
            assert (ended["exit_code"], ended["signal"]) == (137, 9)
            assert (told["state"], told["signal"]) == ("exited", 9)
            assert spoken.json()["error"]["code"] == "session-ended"
        else:
            assert (ended["exit_code"], ended["signal"]) == (0, None)
            assert told["state"] == "running"
            assert spoken.json()["stdout"] == "1\n"


def wait_for(daemon: Daemon, sandbox: str, path: str) -> None:
    deadline = time.monotonic() + times.scaled(60)
    while not daemon.http.head(f"/v1/sandboxes/{sandbox}/files", params={"path": path}).is_success:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_meanwhile_nothing_else_is_let_in(daemon: Daemon, how: str) -> None:
    with daemon.sandbox("busybox") as sandbox, client_of(daemon) as client:
        url = f"/v1/sandboxes/{sandbox}"
        session = daemon.http.post(f"{url}/sessions", json={}).json()
        body = {"command": "echo up; cat /dev/zero > /dev/null & sleep 3", "exclusive": how}
        frames = {"Accept": "application/x-ndjson"}
        with client.stream("POST", f"{url}/exec", json=body, headers=frames) as stream:
            lines = stream.iter_lines()
            while '"up' not in next(lines):
                pass
            file = {"path": "/tmp/x"}
            for refused in (
                daemon.http.post(f"{url}/exec", json={"command": "true"}),
                daemon.http.post(f"{url}/exec", json={"command": "true", "exclusive": True}),
                daemon.http.post(f"{url}/processes", json={"command": "true"}),
                daemon.http.post(f"{url}/sessions", json={}),
                daemon.http.post(f"{url}/sessions/{session['id']}/exec", json={"command": "true"}),
                daemon.http.put(f"{url}/files", params=file, content=b"x"),
                daemon.http.get(f"{url}/files", params=file),
                daemon.http.post(f"{url}/pause"),
                daemon.http.post(f"{url}/reset", json={}),
                daemon.http.post(f"{url}/snapshots", json={"on_running": "kill"}),
            ):
                assert refused.status_code == 409, refused.text
                assert refused.json()["error"]["code"] == "sandbox-exclusive"
                assert refused.json()["error"]["cause"] == "request"
            last = [line for line in lines if line][-1]
        assert '"exit_code":0' in last
        # What it left in the background went with it.
        deadline = time.monotonic() + times.scaled(60)
        while True:
            done = daemon.http.post(f"{url}/exec", json={"command": "ps | grep -c [z]ero"})
            if done.is_success:
                break
            assert time.monotonic() < deadline
        assert done.json()["stdout"] == "0\n"


def test_a_client_that_goes_frees_the_sandbox(daemon: Daemon) -> None:
    with daemon.sandbox("busybox") as sandbox:
        url = f"/v1/sandboxes/{sandbox}"
        process = daemon.http.post(
            f"{url}/processes", json={"command": "while :; do date +%s%N > /tmp/at; done"}
        ).json()
        body = {"command": "sleep 1000", "exclusive": "freeze", "timeout_s": 1000}
        frames = {"Accept": "application/x-ndjson"}
        with client_of(daemon) as client:
            with client.stream("POST", f"{url}/exec", json=body, headers=frames) as stream:
                assert "started" in next(stream.iter_lines())
        deadline = time.monotonic() + times.scaled(60)
        while not (told := daemon.http.post(f"{url}/exec", json={"command": "true"})).is_success:
            assert told.json()["error"]["code"] == "sandbox-exclusive"
            assert time.monotonic() < deadline
        assert daemon.http.get(f"{url}/processes/{process['id']}").json()["state"] == "running"
        before = daemon.exec(sandbox, "cat /tmp/at")["stdout"]
        while daemon.exec(sandbox, "cat /tmp/at")["stdout"] in (before, ""):
            assert time.monotonic() < deadline
        alive(daemon, sandbox)


def test_an_upload_at_the_same_time_is_told_why(daemon: Daemon) -> None:
    with daemon.sandbox("busybox") as sandbox:
        url = f"/v1/sandboxes/{sandbox}"

        def upload() -> dict[str, Any]:
            def slowly() -> Iterator[bytes]:
                yield b"x" * 65536
                daemon.exec(sandbox, ["/bin/true"], exclusive=True)
                yield b"y" * 65536

            with client_of(daemon) as client:
                path = {"path": "/tmp/upload"}
                answer = client.put(
                    f"{url}/files",
                    params=path,
                    content=slowly(),
                    headers={"Content-Length": "131072"},
                )
                return dict(answer.json())

        error = upload()["error"]
        assert (error["code"], error["cause"]) == ("sandbox-exclusive", "request")
        assert daemon.http.head(f"{url}/files", params={"path": "/tmp/upload"}).status_code == 404


def test_a_daemon_that_starts_anew_lets_the_frozen_go_on(
    leak_check: LeakCheck, busybox: Path
) -> None:
    with running_node(leak_check, {"busybox": busybox}) as node:
        first = node.serve()
        sandbox = first.create("busybox")
        url = f"/v1/sandboxes/{sandbox}"
        loop = {"command": "while :; do date +%s%N > /tmp/at.new; mv /tmp/at.new /tmp/at; done"}
        process = first.http.post(f"{url}/processes", json=loop).json()
        wait_for(first, sandbox, "/tmp/at")
        body = {"command": "sleep 1000", "exclusive": "freeze", "timeout_s": 1000}
        frames = {"Accept": "application/x-ndjson"}
        with client_of(first) as client:
            with client.stream("POST", f"{url}/exec", json=body, headers=frames) as stream:
                assert "started" in next(stream.iter_lines())
                node.kill_daemon(first)
        again = node.serve()
        assert again.http.get(f"{url}/processes/{process['id']}").json()["state"] == "running"
        before = again.exec(sandbox, "cat /tmp/at")["stdout"]
        deadline = time.monotonic() + times.scaled(60)
        while again.exec(sandbox, "cat /tmp/at")["stdout"] == before:
            assert time.monotonic() < deadline
        assert again.exec(sandbox, "ps | grep -c '[s]leep 1000'")["stdout"] == "0\n"
        again.delete(sandbox)


def events(daemon: Daemon, sandbox: str) -> list[dict[str, Any]]:
    return list(daemon.http.get(f"/v1/sandboxes/{sandbox}/events").json()["events"])


def test_delete_does_not_wait_for_it(daemon: Daemon) -> None:
    sandbox = daemon.create("busybox")
    body = {"command": "touch /tmp/up; sleep 1000", "exclusive": "freeze", "timeout_s": 1000}

    def judge() -> dict[str, Any]:
        with client_of(daemon) as client:
            return dict(client.post(f"/v1/sandboxes/{sandbox}/exec", json=body).json())

    with in_background(judge) as running:
        deadline = time.monotonic() + times.scaled(60)
        # Not by an exec that is refused by then: it might be frozen with the rest.
        while not any(event["kind"] == "exclusive" for event in events(daemon, sandbox)):
            assert time.monotonic() < deadline
        daemon.delete(sandbox)
        assert running.result()["error"]["code"] == "sandbox-dead"
