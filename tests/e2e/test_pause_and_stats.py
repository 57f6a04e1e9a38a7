"""Freezing a sandbox, what it uses, and ending many at once, by a real daemon."""

from __future__ import annotations

import time
from typing import Any

import httpx

from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon

MEBIBYTE = 1 << 20
COUNTER = "n=0; while :; do n=$((n+1)); echo $n > /tmp/m; mv /tmp/m /tmp/n; done"


def number(daemon: Daemon, sandbox: str) -> str:
    answer = daemon.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/tmp/n"})
    assert answer.is_success, answer.text
    return answer.text


def wait_running(daemon: Daemon, sandbox: str) -> None:
    before = None
    deadline = time.monotonic() + 20
    while True:
        answer = daemon.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/tmp/n"})
        if answer.is_success and answer.text.strip() and answer.text != before:
            if before is not None:
                return
            before = answer.text
        assert time.monotonic() < deadline


def verb(daemon: Daemon, sandbox: str, name: str, **body: Any) -> httpx.Response:
    return daemon.http.post(f"/v1/sandboxes/{sandbox}/{name}", json=body or None)


def test_a_paused_sandbox_stands_still_and_goes_on(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, f"({COUNTER}) > /dev/null 2>&1 &")
    wait_running(daemon, sandbox)
    assert verb(daemon, sandbox, "pause").json()["state"] == "paused"
    still = number(daemon, sandbox)
    time.sleep(0.2)  # for the chance to count on: nothing tells that nothing happens
    assert number(daemon, sandbox) == still
    used = daemon.http.get(f"/v1/sandboxes/{sandbox}/stats").json()["cpu"]["usage_s"]
    answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": ["true"]})
    refusal(answer, 409, "sandbox-paused", "request", retryable=False)
    assert verb(daemon, sandbox, "resume").json()["state"] == "running"
    wait_running(daemon, sandbox)
    assert daemon.http.get(f"/v1/sandboxes/{sandbox}/stats").json()["cpu"]["usage_s"] > used
    kinds = [one["kind"] for one in events(daemon, sandbox)]
    assert kinds == ["created", "paused", "resumed"]


def events(daemon: Daemon, sandbox: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.http.get(f"/v1/sandboxes/{sandbox}/events").json()[
        "events"
    ]
    return found


def test_a_paused_sandbox_is_deleted_like_any_other(daemon: Daemon):
    sandbox = daemon.create("busybox")
    daemon.exec(sandbox, f"({COUNTER}) > /dev/null 2>&1 &")
    assert verb(daemon, sandbox, "pause").is_success
    daemon.delete(sandbox)


def test_stats_tell_what_was_done(daemon: Daemon):
    limits = {"memory_mb": 64, "disk_mb": 32, "inodes": 100, "pids": 32, "cpus": 0.2}
    with daemon.sandbox("busybox", limits=limits) as sandbox:
        before = daemon.http.get(f"/v1/sandboxes/{sandbox}/stats").json()
        assert before["disk"]["size_bytes"] == 32 * MEBIBYTE
        assert before["pids"]["limit"] == 32
        daemon.exec(sandbox, "head -c 8388608 /dev/zero > /tmp/a; sleep 60 > /dev/null 2>&1 &")
        daemon.exec(sandbox, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
        after = daemon.http.get(f"/v1/sandboxes/{sandbox}/stats").json()
        written = after["disk"]["used_bytes"] - before["disk"]["used_bytes"]
        assert 8 * MEBIBYTE <= written < 9 * MEBIBYTE
        assert after["disk"]["used_inodes"] > before["disk"]["used_inodes"]
        assert after["cpu"]["usage_s"] > before["cpu"]["usage_s"]
        # A fifth of a processor for what would take all of one.
        assert after["cpu"]["throttled_periods"] > 0
        assert after["cpu"]["throttled_s"] > 0
        assert after["memory"]["used_bytes"] >= 8 * MEBIBYTE
        assert after["memory"]["peak_bytes"] >= after["memory"]["used_bytes"]
        assert after["memory"]["limit_bytes"] == 96 * MEBIBYTE
        assert after["pids"]["count"] >= 1
        assert after["memory"]["oom_kills"] == 0


def test_an_oom_kill_is_counted_and_told(daemon: Daemon):
    limits = {"memory_mb": 32, "disk_mb": 1}
    with daemon.sandbox("busybox", limits=limits) as sandbox:
        result = daemon.exec(sandbox, ["sh", "-c", "x=$(yes | head -c 200000000); echo $?"])
        stats = daemon.http.get(f"/v1/sandboxes/{sandbox}/stats").json()
        assert stats["memory"]["oom_kills"] >= 1
        if result["oom_killed"]:
            assert events(daemon, sandbox)[-1]["kind"] == "oom"


def test_an_idle_sandbox_goes_and_one_at_work_stays(daemon: Daemon):
    idle = daemon.create("busybox", idle_timeout_s=1)
    busy = daemon.create("busybox", idle_timeout_s=1)
    assert daemon.exec(busy, ["sleep", "2"])["exit_code"] == 0
    answer = daemon.http.get(f"/v1/sandboxes/{idle}")
    refusal(answer, 404, "sandbox-not-found", "request")
    assert daemon.http.get(f"/v1/sandboxes/{busy}").json()["state"] == "running"
    daemon.delete(busy)


def test_a_run_is_ended_as_a_whole(daemon: Daemon):
    mine = [daemon.create("busybox", run="mine", labels={"n": str(n % 2)}) for n in range(6)]
    with daemon.sandbox("busybox", run="other") as other:
        some = daemon.http.delete("/v1/sandboxes", params={"run": "mine", "label": "n=1"}).json()
        assert sorted(some["deleted"]) == sorted(mine[1::2])
        rest = daemon.http.delete("/v1/sandboxes", params={"run": "mine"}).json()
        assert sorted(rest["deleted"]) == sorted(mine[0::2])
        assert daemon.http.get(f"/v1/sandboxes/{other}").is_success


def test_files_are_there_from_the_start(daemon: Daemon):
    files = [
        {"path": "/work/sub/run.sh", "content": "#!/bin/sh\nid -u\n", "mode": "0755"},
        {"path": "/work/own", "content": "x", "user": "agent"},
    ]
    with daemon.sandbox("busybox", files=files) as sandbox:
        assert daemon.exec(sandbox, ["/work/sub/run.sh"])["stdout"] == "0\n"
        assert daemon.exec(sandbox, ["stat", "-c", "%U %a", "/work/own"])["stdout"] == "agent 644\n"


def test_a_create_whose_client_has_gone_is_undone(start_daemon: Any):
    daemon = start_daemon(arguments=("--max-sandboxes", "1"))
    first = daemon.create("busybox")
    try:
        daemon.http.post("/v1/sandboxes", json={"image": "busybox", "wait_s": 60}, timeout=0.5)
    except httpx.ReadTimeout:
        pass
    else:
        raise AssertionError("there was no room for it")
    daemon.delete(first)
    with daemon.sandbox("busybox"):  # nobody else has taken the room
        listed = daemon.http.get("/v1/sandboxes").json()["sandboxes"]
        assert len(listed) == 1
