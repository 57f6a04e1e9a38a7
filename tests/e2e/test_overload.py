"""A node that is asked for more than it has, in a small; the full size is in tier `load`."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import httpx
import pytest

from tests.e2e import storm
from tests.e2e.at_once import at_once, client_of, in_background
from tests.e2e.host_processes import wait_for
from tests.framework.fixtures import StartDaemon

ROOM = 60
ASKED = 400


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.timeout(240)
def test_those_for_whom_there_is_room_are_served_and_the_rest_told_when(
    start_daemon: StartDaemon, capsys: pytest.CaptureFixture[str]
):
    daemon = start_daemon(environment={"SANDBOXD_MAX_SANDBOXES": str(ROOM)})
    probed = [daemon.create("busybox", limits=storm.SMALL) for _ in range(2)]
    found = storm.rage(daemon, ASKED, probed)
    with capsys.disabled():
        print(f"\n{storm.report(found)}")
    assert len(found.answers) == ASKED
    assert found.served == ROOM - len(probed)
    refused = [answer for answer in found.answers if answer[0] != 201]
    assert {answer[:2] for answer in refused} == {(429, "node-overloaded")}
    assert all(answer[2] and 1 <= int(answer[2]) <= 60 for answer in refused)
    assert len(found.during) > 0
    counts = daemon.http.get("/v1/node").json()["admission"]["used"]
    assert counts["sandboxes"] == ROOM
    ended = daemon.http.delete("/v1/sandboxes", params={"label": "none"})
    assert ended.json()["deleted"] == []
    for row in daemon.http.get("/v1/sandboxes", params={"limit": 1000}).json()["sandboxes"]:
        daemon.delete(row["id"])
    assert daemon.http.get("/v1/node").json()["admission"]["used"]["sandboxes"] == 0


@pytest.mark.timeout(240)
def test_those_that_wait_are_served_as_others_leave(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_MAX_SANDBOXES": "8"})
    # Each leaves by itself after a moment, so sixty can follow one another through eight seats.
    with httpx.Client(base_url=daemon.base_url, headers=daemon.http.headers, timeout=120) as client:
        body = {"image": "busybox", "limits": storm.SMALL, "ttl_s": 0.5, "wait_s": 60}

        def ask(_: int) -> int:
            return client.post("/v1/sandboxes", json=body).status_code

        assert at_once(ask, range(60), threads=60) == [201] * 60


def test_a_run_ends_while_it_is_being_made(start_daemon: StartDaemon):
    """Creates race with the end of their run: what is answered 201 is gone, the rest is refused."""
    daemon = start_daemon()
    with client_of(daemon) as client:
        body = {"image": "busybox", "limits": storm.SMALL, "run": "racing"}

        def work(n: int) -> httpx.Response:
            if n == 20:
                return client.delete("/v1/runs/racing")
            return client.post("/v1/sandboxes", json=body)

        answers = at_once(work, range(40), threads=20)
        assert answers[20].status_code == 200, answers[20].text
        for answer in answers[:20] + answers[21:]:
            if answer.status_code != 201:
                assert error_of(answer)["code"] == "run-ended"
        assert client.delete("/v1/runs/racing").json()["pending"] == []
    wait_for(
        lambda: daemon.http.get("/v1/sandboxes").json()["sandboxes"] == [], "the end of the run"
    )


def test_a_node_with_too_little_free_memory_takes_nothing_on(start_daemon: StartDaemon):
    total_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    daemon = start_daemon(
        environment={
            "SANDBOXD_MEMORY_RESERVE_MB": str(total_mb - 64),
            "SANDBOXD_MEMORY_OVERCOMMIT": "1000",
        }
    )
    answer = daemon.http.post("/v1/sandboxes", json={"image": "busybox", "limits": storm.SMALL})
    assert answer.status_code == 429
    assert answer.json()["error"]["detail"]["reason"] == "pressure"
    admission = daemon.http.get("/v1/node").json()["admission"]
    assert (admission["open"], admission["closed_by"]) == (False, ["memory-low"])


def test_a_drained_node_lets_what_runs_go_on(start_daemon: StartDaemon):
    daemon = start_daemon()
    sandbox = daemon.create("busybox")
    with in_background(lambda: daemon.exec(sandbox, "sleep 1; echo done")) as answer:
        assert daemon.http.post("/v1/node/drain", json={"deadline_s": 30}).status_code == 200
        refused = daemon.http.post("/v1/sandboxes", json={"image": "busybox"})
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "node-draining"
        assert answer.result()["stdout"] == "done\n"
    assert daemon.http.post("/v1/node/drain", json={"deadline_s": 0}).status_code == 200
    wait_for(
        lambda: daemon.http.get("/v1/sandboxes").json()["sandboxes"] == [], "the deadline's end"
    )
    assert daemon.http.post("/v1/node/undrain").status_code == 200
    with daemon.sandbox("busybox") as again:
        assert daemon.exec(again, ["echo", "on"])["stdout"] == "on\n"


def test_more_connections_than_there_may_be(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_MAX_CONNECTIONS": "16"})
    host, port = daemon.base_url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=daemon.base_url, headers=daemon.http.headers))
            for _ in range(40)
        ]
        answers = [client.get("/v1/node") for client in clients]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) >= 20
        assert {answer.status_code for answer in refused} == {503}
        assert {error_of(answer)["code"] for answer in refused} == {"too-many-connections"}
        assert all(answer.headers["retry-after"] for answer in refused)
    # Silent ones, which need no token, keep nobody out for long.
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(socket.create_connection((host, int(port))))
        with httpx.Client(base_url=daemon.base_url, headers=daemon.http.headers) as client:
            wait_for(lambda: client.get("/v1/node").status_code == 200, "a place")
