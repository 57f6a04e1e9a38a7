"""Reset, snapshot, rollback and fork: what comes back, what does not, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.at_once import in_background
from tests.e2e.host_processes import new_marker, pids_with, wait_for_marker
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon

UNKNOWN = "sn-" + "a" * 26
MIB = 1024 * 1024


@pytest.fixture
def box(daemon: Daemon) -> Iterator[str]:
    sandbox = daemon.create("busybox", limits={"disk_mb": 64, "memory_mb": 128})
    yield sandbox
    daemon.delete(sandbox)


@pytest.fixture
def snapshots(daemon: Daemon) -> Iterator[None]:
    """Whatever snapshots a test takes go with it."""
    yield
    for snapshot in daemon.http.get("/v1/snapshots").json()["snapshots"]:
        assert daemon.http.delete(f"/v1/snapshots/{snapshot['id']}").status_code == 204


def sh(daemon: Daemon, sandbox: str, script: str) -> str:
    answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": script})
    assert answer.status_code == 200, answer.text
    assert answer.json()["exit_code"] == 0, answer.json()
    return answer.json()["stdout"]


def take(daemon: Daemon, sandbox: str, **body: Any) -> dict[str, Any]:
    answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"] == f"/v1/snapshots/{answer.json()['id']}"
    return answer.json()


def fork_of(daemon: Daemon, snapshot: str) -> str:
    answer = daemon.http.post("/v1/sandboxes", json={"snapshot": snapshot})
    assert answer.status_code == 201, answer.text
    assert (answer.json()["image"], answer.json()["snapshot"]) == ("busybox", snapshot)
    return answer.json()["id"]


def rollback(daemon: Daemon, sandbox: str, snapshot: str) -> None:
    url = f"/v1/sandboxes/{sandbox}/rollback"
    answer = daemon.http.post(url, json={"snapshot": snapshot})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == sandbox


def reset(daemon: Daemon, sandbox: str) -> None:
    answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/reset")
    assert answer.status_code == 200, answer.text


def test_reset_leaves_nothing_of_what_was(daemon: Daemon, box: str):
    sh(daemon, box, "echo x > /written; rm /bin/cat; echo y > /dev/shm/y; mkdir /dev/z")
    marker = new_marker()
    sh(daemon, box, f"(exec sleep {marker}) >/dev/null 2>&1 &")
    wait_for_marker(marker)
    reset(daemon, box)
    assert pids_with(marker) == []
    assert sh(daemon, box, "ls / /dev /dev/shm").split().count("written") == 0
    assert sh(daemon, box, "cat /dev/null; ls -A /dev/shm; ls -d /dev/z 2>/dev/null || true") == ""


def test_reset_ends_what_waits_with_its_own_error(daemon: Daemon, box: str):
    marker = new_marker()
    url = f"/v1/sandboxes/{box}/exec"
    with in_background(
        lambda: daemon.http.post(url, json={"command": ["sleep", str(marker)]})
    ) as waiting:
        wait_for_marker(marker)
        reset(daemon, box)
        refusal(waiting.result(), 409, "sandbox-reset", "request")
    assert sh(daemon, box, "echo usable") == "usable\n"


@pytest.mark.usefixtures("snapshots")
def test_rollback_and_fork_see_the_moment_of_the_snapshot(daemon: Daemon, box: str):
    sh(daemon, box, "mkdir /w; echo one > /w/f; rm /bin/true")
    first = take(daemon, box)
    assert (first["how"], first["frozen_ms"], first["sandbox"]) == ("frozen", None, box)
    sh(daemon, box, "echo two > /w/f; echo g > /w/g; rm -r /tmp")
    second = take(daemon, box)
    sh(daemon, box, "rm -r /w")

    fork = fork_of(daemon, second["id"])
    try:
        assert sh(daemon, fork, "cat /w/f /w/g; ls -d /tmp 2>/dev/null || echo gone") == (
            "two\ng\ngone\n"
        )
        sh(daemon, fork, "echo fork > /w/f")
        rollback(daemon, box, first["id"])
        assert sh(daemon, box, "cat /w/f; ls /w; ls /bin/true 2>/dev/null || echo gone") == (
            "one\nf\ngone\n"
        )
        assert sh(daemon, fork, "cat /w/f") == "fork\n"  # neither sees the other
    finally:
        daemon.delete(fork)


@pytest.mark.usefixtures("snapshots")
def test_a_fork_outlives_its_snapshot_and_its_sandbox(daemon: Daemon):
    origin = daemon.create("busybox")
    sh(daemon, origin, "echo kept > /kept")
    snapshot = take(daemon, origin, name="base")["id"]
    fork = fork_of(daemon, snapshot)
    daemon.delete(origin)
    assert daemon.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
    assert daemon.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
    assert sh(daemon, fork, "cat /kept") == "kept\n"
    daemon.delete(fork)
    refusal(daemon.http.get(f"/v1/snapshots/{snapshot}"), 404, "snapshot-not-found", "request")


@pytest.mark.usefixtures("snapshots")
def test_live_processes_refuse_are_killed_or_are_copied_from(daemon: Daemon, box: str):
    marker = new_marker()
    loop = "i=0; while :; do i=$((i+1)); echo $i >> /log; done"
    sh(daemon, box, f"(sh -c '{loop}' {marker}) >/dev/null 2>&1 & sleep {marker} >/dev/null 2>&1 &")
    wait_for_marker(marker)
    url = f"/v1/sandboxes/{box}/snapshots"
    refused = daemon.http.post(url, json={"on_running": "fail"})
    assert "on_running" in refusal(refused, 409, "sandbox-running", "request")["hint"]

    copied = take(daemon, box, on_running="copy")
    assert copied["how"] == "copied"
    assert copied["frozen_ms"] > 0
    assert pids_with(marker) != []  # they go on
    fork = fork_of(daemon, copied["id"])
    try:
        before = sh(daemon, fork, "wc -l < /log")
        lines = sh(daemon, fork, "cat /log").split()
        assert lines == [str(i + 1) for i in range(int(before))]  # whole lines, in order
        assert sh(daemon, fork, "wc -l < /log") == before  # nobody writes there any more
    finally:
        daemon.delete(fork)

    assert take(daemon, box, on_running="kill")["how"] == "killed"
    assert pids_with(marker) == []


@pytest.mark.usefixtures("snapshots")
def test_a_copy_is_exact(daemon: Daemon, box: str):
    sh(
        daemon,
        box,
        "mkdir -p /d/sub; head -c 300000 /dev/urandom > /d/a; ln /d/a /d/sub/hard; ln -s a /d/sym;"
        "mkfifo /d/fifo; chmod 4751 /d/a; chown 42:43 /d/sub; rm /bin/sleep; rm -r /home;"
        "truncate -s 1000000 /d/hole; touch -d '2001-02-03 04:05:06' /d/sym /d/sub;"
        "tail -f /dev/null >/dev/null 2>&1 &",
    )
    look = (
        "find /d | sort | xargs ls -lnd; ls -ln /d/sub; md5sum /d/a /d/hole /d/sub/hard;"
        "stat -c '%n %h %b %Y' /d/a /d/hole; ls -d /bin/sleep /home 2>&1 | sort"
    )
    here = daemon.http.post(f"/v1/sandboxes/{box}/exec", json={"command": look}).json()["stdout"]
    fork = fork_of(daemon, take(daemon, box, on_running="copy")["id"])
    try:
        there = daemon.http.post(f"/v1/sandboxes/{fork}/exec", json={"command": look})
        assert there.json()["stdout"] == here
    finally:
        daemon.delete(fork)


@pytest.mark.usefixtures("snapshots")
def test_disk_holds_for_all_layers_together(daemon: Daemon, box: str):
    sh(daemon, box, f"head -c {40 * MIB} /dev/zero > /a")
    take(daemon, box)
    answer = daemon.http.post(
        f"/v1/sandboxes/{box}/exec", json={"command": "dd if=/dev/zero of=/b bs=1M count=40"}
    ).json()
    assert answer["exit_code"] != 0
    assert "No space left" in answer["stderr"]  # not killed for memory
    assert answer["oom_killed"] is False


def test_what_is_not_there_is_named(daemon: Daemon, box: str):
    url = f"/v1/sandboxes/{box}/rollback"
    answer = daemon.http.post(url, json={"snapshot": UNKNOWN})
    refusal(answer, 404, "snapshot-not-found", "request")
    answer = daemon.http.post("/v1/sandboxes", json={"snapshot": UNKNOWN})
    refusal(answer, 404, "snapshot-not-found", "request")
    for body in ({}, {"image": "busybox", "snapshot": UNKNOWN}):
        refusal(daemon.http.post("/v1/sandboxes", json=body), 422, "request-invalid", "request")
    assert sh(daemon, box, "echo unharmed") == "unharmed\n"


@pytest.mark.usefixtures("snapshots")
def test_snapshots_are_listed_by_run(daemon: Daemon):
    made = daemon.create("busybox", run="run-s")
    snapshot = take(daemon, made, name="n", ttl_s=600)
    listed = daemon.http.get("/v1/snapshots", params={"run": "run-s"}).json()["snapshots"]
    assert [one["id"] for one in listed] == [snapshot["id"]]
    assert (listed[0]["name"], listed[0]["sandbox"], listed[0]["image"]) == ("n", made, "busybox")
    assert daemon.http.get("/v1/snapshots", params={"run": "other"}).json()["snapshots"] == []
    daemon.delete(made)


def test_processes_are_refused_by_name_and_the_node_says_why(daemon: Daemon, box: str):
    answer = daemon.http.post(f"/v1/sandboxes/{box}/snapshots", json={"processes": True})
    refusal(answer, 501, "checkpoint-unsupported", "request")
    assert "cannot be restored" in daemon.http.get("/v1/node").json()["features"]["checkpoint"] or (
        "criu does not work" in daemon.http.get("/v1/node").json()["features"]["checkpoint"]
    )
    assert daemon.http.get("/v1/snapshots").json()["snapshots"] == []


def test_a_reset_tells_its_own_milliseconds(daemon: Daemon, box: str):
    made = daemon.http.get(f"/v1/sandboxes/{box}").json()["phases_ms"]
    told = daemon.http.post(f"/v1/sandboxes/{box}/reset").json()
    assert told["phases_ms"] == told["reset_ms"] != made
    assert {"slot", "death", "total"} <= told["reset_ms"].keys()
    assert daemon.http.get(f"/v1/sandboxes/{box}").json()["phases_ms"] == made
