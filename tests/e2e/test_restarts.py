"""A node that is a unit of its own: the daemon beside it ends at any time, and nothing is lost.

Sandboxes, background processes, sessions and snapshots live on; the next daemon has them as they
were; what was half done is finished or gone.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.at_once import client_of, in_background
from tests.e2e.host_processes import (
    family_with,
    new_marker,
    pids_with,
    wait_for,
    wait_for_end,
    wait_for_marker,
)
from tests.e2e.restarts import Node, running_node, start_node, wait_end
from tests.framework import host_state
from tests.framework.daemon import Daemon, DaemonError
from tests.framework.leaks import LeakCheck

StartDaemon = Callable[..., Daemon]


@pytest.fixture
def node(leak_check: LeakCheck, busybox: Path) -> Iterator[Node]:
    with running_node(leak_check, {"busybox": busybox}) as node:
        yield node


def processes_of(node: Node, words: str) -> list[int]:
    table = host_state.process_table()
    return family_with({one.pid for one in table[node.process.pid].descendants()}, words)


def delete_all(daemon: Daemon) -> None:
    for sandbox in daemon.http.get("/v1/sandboxes").json()["sandboxes"]:
        daemon.delete(sandbox["id"])
    for snapshot in daemon.http.get("/v1/snapshots").json()["snapshots"]:
        assert daemon.http.delete(f"/v1/snapshots/{snapshot['id']}").is_success


def wait_output(
    daemon: Daemon, sandbox: str, process: str, total_bytes: int, offset: int = 0
) -> str:
    """What it wrote from `offset` on, once it has written that much in all."""
    path = f"/v1/sandboxes/{sandbox}/processes/{process}"
    found: dict[str, Any] = {}

    def there() -> bool:
        answer = daemon.http.get(path, params={"stdout_offset": offset})
        assert answer.status_code == 200, answer.text
        found.update(answer.json()["stdout"])
        return bool(found["total_bytes"] >= total_bytes)

    wait_for(there, f"{total_bytes} bytes of output")
    assert (found["total_bytes"], found["lost_bytes"]) == (total_bytes, 0)
    return str(found["data"])


def test_a_killed_daemon_loses_nothing(node: Node):
    first = node.serve()
    spec = {
        "name": "mine", "run": "r7", "labels": {"a": "b"}, "env": {"A": "1"}, "ttl_s": 900,
        "limits": {"pids": 77, "memory_mb": 300},
    }  # fmt: skip
    headers = {"Idempotency-Key": "k-1"}
    body = {"image": "busybox", **spec}
    made = first.http.post("/v1/sandboxes", json=body, headers=headers)
    assert made.status_code == 201, made.text
    sandbox = made.json()["id"]
    before = first.http.get(f"/v1/sandboxes/{sandbox}").json()
    first.exec(sandbox, "echo kept > /root/file")
    marker = new_marker()
    script = f"n=0; while read l; do n=$((n+1)); echo $n:$l; done; exec sleep {marker}"
    started = first.http.post(
        f"/v1/sandboxes/{sandbox}/processes", json={"command": script, "stdin": True}
    )
    assert started.status_code == 201, started.text
    process = started.json()["id"]
    stdin = f"/v1/sandboxes/{sandbox}/processes/{process}/stdin"
    assert first.http.post(stdin, json={"data": "one\ntwo\n"}).is_success
    wait_output(first, sandbox, process, 12)
    snapshot = first.http.post(
        f"/v1/sandboxes/{sandbox}/snapshots", json={"on_running": "copy", "name": "s"}
    )
    assert snapshot.status_code == 201, snapshot.text
    foreground = new_marker()
    with client_of(first) as client:

        def run() -> None:
            with pytest.raises(httpx.TransportError):
                client.post(
                    f"/v1/sandboxes/{sandbox}/exec",
                    json={"command": f"setsid sleep {foreground} & sleep {foreground}"},
                )

        with in_background(run) as ended:
            wait_for_marker(foreground, count=2)
            node.kill_daemon(first)
            ended.result()
    # Whoever waited for it is gone, and so is all that it started.
    wait_for(lambda: pids_with(foreground) == [], "the end of the command nobody waits for")
    second = node.serve()
    after = second.http.get(f"/v1/sandboxes/{sandbox}").json()
    assert after == {**before, "phases_ms": after["phases_ms"]}
    assert second.exec(sandbox, "cat /root/file; echo $A")["stdout"] == "kept\n1\n"
    # The same key still means the same sandbox.
    again = second.http.post("/v1/sandboxes", json=body, headers=headers)
    assert again.json()["id"] == sandbox
    # Positions in the output go on where they were, and its stdin is still open.
    assert wait_output(second, sandbox, process, 12) == "1:one\n2:two\n"
    assert second.http.post(stdin, json={"data": "three\n"}).is_success
    assert wait_output(second, sandbox, process, 20, offset=12) == "3:three\n"
    forked = second.http.post("/v1/sandboxes", json={"snapshot": snapshot.json()["id"]})
    assert forked.status_code == 201, forked.text
    assert second.exec(forked.json()["id"], "cat /root/file")["stdout"] == "kept\n"
    delete_all(second)


def test_a_session_lives_on_and_its_command_does_not(node: Node):
    first = node.serve()
    sandbox = first.create("busybox")
    opened = first.http.post(f"/v1/sandboxes/{sandbox}/sessions", json={})
    assert opened.status_code == 201, opened.text
    session = f"/v1/sandboxes/{sandbox}/sessions/{opened.json()['id']}/exec"
    assert first.http.post(session, json={"command": "cd /tmp; X=kept"}).is_success
    marker = new_marker()
    with client_of(first) as client:

        def run() -> None:
            with pytest.raises(httpx.TransportError):
                client.post(session, json={"command": f"sleep {marker}"})

        with in_background(run) as ended:
            wait_for_marker(marker)
            node.kill_daemon(first)
            ended.result()
    second = node.serve()
    answer = second.http.post(session, json={"command": 'echo "$PWD $X"'})
    assert answer.json()["stdout"] == "/tmp kept\n", answer.text
    wait_for(lambda: pids_with(marker) == [], "the end of the command nobody waits for")
    delete_all(second)


def test_a_stopped_daemon_lets_requests_end_and_leaves_the_sandboxes(node: Node):
    first = node.serve()
    sandbox = first.create("busybox")
    marker = new_marker()
    with client_of(first) as client:

        def run(seconds: str) -> httpx.Response:
            # One ends when the daemon has stopped to take connections, the other never.
            return client.post(
                f"/v1/sandboxes/{sandbox}/exec", json={"command": ["sleep", seconds]}
            )

        with (
            in_background(lambda: run(marker)) as ends,
            in_background(lambda: run(marker)) as lasts,
        ):
            wait_for_marker(marker, count=2)
            first.process.terminate()
            wait_for(lambda: not accepts(first), "a stop")
            os.kill(pids_with(marker)[0], signal.SIGTERM)
            answers = sorted((ends.result(), lasts.result()), key=lambda one: one.status_code)
    assert answers[0].json()["exit_code"] == 128 + signal.SIGTERM, answers[0].text
    assert answers[1].status_code == 503, answers[1].text
    assert answers[1].json()["error"]["code"] == "node-unavailable"
    assert wait_end(first.process) == 0
    wait_for(lambda: pids_with(marker) == [], "the end of what was cut off")
    second = node.serve()
    assert second.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
    delete_all(second)


def accepts(daemon: Daemon) -> bool:
    port = int(daemon.base_url.rpartition(":")[2])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_servers_of_images_that_were_taken_over_are_watched(node: Node):
    first = node.serve()
    sandbox = first.create("busybox")
    node.kill_daemon(first)
    second = node.serve()
    [row] = [row for row in second.http.get("/v1/images").json()["images"] if row["mounted"]]
    assert (row["name"], row["users"]) == ("busybox", 1)
    (server,) = processes_of(node, "squashfuse")
    os.kill(server, signal.SIGKILL)
    path = f"/v1/sandboxes/{sandbox}"
    wait_for(lambda: second.http.get(path).json()["state"] == "failed", "its end")
    assert second.http.get(path).json()["failure"]["code"] == "sandbox-lost"
    with second.sandbox("busybox") as fresh:  # the image is served anew
        assert second.exec(fresh, ["echo", "alive"])["stdout"] == "alive\n"
    second.delete(sandbox)
    # One that nobody uses is still known by its name, and can be unmounted by a later daemon.
    node.kill_daemon(second)
    third = node.serve()
    assert third.http.delete("/v1/images/busybox").is_success
    wait_for(lambda: processes_of(node, "squashfuse") == [], "the end of its server")


def test_a_directory_of_another_boot_is_no_obstacle(leak_check: LeakCheck, busybox: Path):
    """What a power failure leaves in a directory that outlives a boot."""
    left = {"node.lock": b"unit", "api.lock": b"1", "launcher.sock": None, "mnt": b""}
    with running_node(leak_check, {"busybox": busybox}, left=left) as node:
        daemon = node.serve()
        with daemon.sandbox("busybox") as sandbox:
            assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"


def test_one_daemon_at_a_time(node: Node):
    first = node.serve()
    with first.sandbox("busybox") as sandbox:
        with pytest.raises(DaemonError, match="another sandboxd serves"):
            node.serve()
        with pytest.raises(DaemonError, match="a node that is a unit of its own serves"):
            node.serve(node="own")
        assert first.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"


def test_a_daemon_finds_a_node_that_is_a_unit_by_itself(node: Node):
    first = node.serve(node="auto")
    sandbox = first.create("busybox")
    first.stop()
    second = node.serve(node="auto")
    assert second.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
    delete_all(second)


def test_two_nodes_in_one_directory_are_refused(node: Node, start_daemon: StartDaemon):
    other = start_node(node.home, node.environment)
    other.notices.close()
    assert wait_end(other.process) == 1
    assert "another node serves in" in other.log
    daemon = node.serve()
    with daemon.sandbox("busybox") as sandbox:
        assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
    # Nor one where a daemon has its own.
    owner = start_daemon()
    late = start_node(owner.state_dir.parent)
    late.notices.close()
    assert wait_end(late.process, 60) == 1
    assert "another sandboxd serves in" in late.log


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_an_answered_command_left_running_lives_on(node: Node, how: str):
    """As it does after an answer; what is killed is a command that somebody waits for."""
    first = node.serve()
    sandbox = first.create("busybox")
    marker = new_marker()
    first.exec(sandbox, f"setsid sleep {marker} & true")
    (pid,) = pids_with(marker)
    if how == "killed":
        node.kill_daemon(first)
    else:
        first.stop()
    second = node.serve()
    # Whoever is to be killed has been by the time that PID 1 answers another command.
    assert second.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
    assert pids_with(marker) == [pid]
    second.delete(sandbox)
    assert pids_with(marker) == []


@pytest.mark.parametrize("words", ["sandboxd.launcher", "init zygote"], ids=["launcher", "zygote"])
def test_a_killed_part_of_the_node_is_named_and_started_anew(node: Node, words: str):
    daemon = node.serve()
    marker = new_marker()
    sandboxes = [daemon.create("busybox") for _ in range(4)]
    daemon.exec(sandboxes[0], f"setsid sleep {marker} & true")
    os.kill(processes_of(node, words)[0], signal.SIGKILL)
    node.wait_notice("it is started anew")
    node.wait_notice("READY=1")
    assert pids_with(marker) == []
    wait_for(lambda: daemon.http.get("/readyz").status_code == 200, "the new node")
    for sandbox in sandboxes:
        seen = daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
        assert (seen["state"], seen["failure"]["code"]) == ("failed", "sandbox-lost")
    with daemon.sandbox("busybox") as fresh:
        assert daemon.exec(fresh, ["echo", "alive"])["stdout"] == "alive\n"
    delete_all(daemon)


def test_a_killed_hostd_takes_the_node_and_a_new_one_serves_the_same_daemon(
    node: Node, leak_check: LeakCheck
):
    daemon = node.serve()
    marker = new_marker()
    sandbox = daemon.create("busybox")
    daemon.exec(sandbox, f"setsid sleep {marker} & true")
    parts = [child.pid for child in host_state.process_table()[node.process.pid].descendants()]
    node.process.kill()
    node.process.wait()
    for pid in parts:
        wait_for_end(pid)
    assert pids_with(marker) == []
    answer = daemon.http.post("/v1/sandboxes", json={"image": "busybox"})
    assert answer.json()["error"]["code"] == "node-unavailable", answer.text
    again = start_node(node.home, node.environment)
    try:
        again.wait_notice("READY=1")
        wait_for(lambda: daemon.http.get("/readyz").status_code == 200, "the new node")
        seen = daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
        assert (seen["state"], seen["failure"]["code"]) == ("failed", "sandbox-lost")
        with daemon.sandbox("busybox") as fresh:
            assert daemon.exec(fresh, ["echo", "alive"])["stdout"] == "alive\n"
        delete_all(daemon)
    finally:
        again.stop()
