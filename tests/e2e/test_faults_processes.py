"""Parts of the node are killed: what fails says so by name, and a clean node stands again.

What dies with the machine's parts is never the workload's doing: a trainer must not see a reward in
it. The leak check of each daemon proves that nothing of the killed one is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.at_once import at_once, client_of, in_background
from tests.e2e.host_processes import (
    family_with,
    new_marker,
    pids_with,
    status_of,
    wait_for,
    wait_for_end,
    wait_for_marker,
)
from tests.e2e.restarts import started_again
from tests.framework.daemon import Daemon, DaemonError

StartDaemon = Callable[..., Daemon]
LOST = {"sandbox-lost", "node-unavailable"}


def hostd_of(daemon: Daemon) -> int:
    return family_with(daemon.refresh_family(), "sandboxd.host")[0]


def launcher_of(daemon: Daemon) -> int:
    return family_with(daemon.refresh_family(), "sandboxd.launcher")[0]


def zygote_of(daemon: Daemon) -> int:
    return family_with(daemon.refresh_family(), "init zygote")[0]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code in (410, 503), answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["cause"] == "node", error
    assert error["retryable"] is True
    assert error["code"] in LOST, error
    return error


def node_serves(daemon: Daemon) -> bool:
    try:
        return daemon.http.get("/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def connections(daemon: Daemon) -> int:
    """How often this daemon has found a launcher. A launcher whose zygote was killed lives on for
    a moment, and so may the old node answer behind the first failure."""
    told = daemon.http.get("/v1/events", params={"kind": "node-connected"}).text
    return told.count('"node-connected"')


def use_it(daemon: Daemon) -> None:
    with daemon.sandbox("busybox") as sandbox:
        assert daemon.exec(sandbox, "echo $((6 * 7))")["stdout"] == "42\n"


def test_a_killed_daemon_takes_everything_along_and_starts_cleanly(start_daemon: StartDaemon):
    daemon = start_daemon()
    marker = new_marker()
    for _ in range(3):
        sandbox = daemon.create("busybox")
        daemon.exec(sandbox, f"trap '' TERM; setsid sleep {marker} & true")
    assert len(pids_with(marker)) == 3
    family = daemon.refresh_family()
    daemon.kill(signal.SIGKILL)
    for pid in family:
        wait_for_end(pid)
    assert pids_with(marker) == []
    with started_again(daemon) as again:
        assert again.http.get("/v1/sandboxes").json()["sandboxes"] == []
        use_it(again)


def test_a_daemon_started_the_moment_another_was_killed_has_a_node(start_daemon: StartDaemon):
    daemon = start_daemon()
    for _ in range(20):
        daemon.create("busybox")
    family = daemon.refresh_family()
    os.kill(daemon.pid, signal.SIGKILL)
    # Not even reaped yet: its node is still being taken down.
    with started_again(daemon) as again:
        use_it(again)
        for pid in family - {daemon.pid}:
            wait_for_end(pid)
        daemon.process.wait()
        use_it(again)


def test_a_second_daemon_in_the_same_directories_is_refused(start_daemon: StartDaemon):
    daemon = start_daemon()
    with daemon.sandbox("busybox") as sandbox:
        with pytest.raises(DaemonError, match="another"), started_again(daemon):
            pass
        assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
    use_it(daemon)


def test_sigterm_ends_everything_and_answers_what_runs(start_daemon: StartDaemon):
    daemon = start_daemon()
    marker = new_marker()
    sandbox = daemon.create("busybox")
    with client_of(daemon) as client:

        def run() -> httpx.Response:
            command = {"command": ["sleep", marker]}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        with in_background(run) as answer:
            wait_for_marker(marker)
            family = daemon.refresh_family()
            daemon.process.terminate()
            try:
                response = answer.result()
            except httpx.TransportError:
                pass  # the connection was closed on it: no result, and none was made up
            else:
                error_of(response)
    assert daemon.process.wait(30) == 0
    for pid in family:
        wait_for_end(pid)
    assert pids_with(marker) == []


@pytest.mark.parametrize("victim", [launcher_of, zygote_of], ids=["launcher", "zygote"])
def test_a_killed_part_is_named_and_the_node_serves_again(
    start_daemon: StartDaemon, victim: Callable[[Daemon], int]
):
    daemon = start_daemon()
    marker = new_marker()
    sandboxes = [daemon.create("busybox") for _ in range(8)]
    before = connections(daemon)
    with client_of(daemon) as client:

        def run(sandbox: str) -> httpx.Response:
            command = {"command": ["sleep", marker], "timeout_s": 100}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        with in_background(lambda: at_once(run, sandboxes, threads=8)) as answers:
            wait_for_marker(marker, count=8)
            os.kill(victim(daemon), signal.SIGKILL)
            # What runs, what comes next, and what is made meanwhile: all by name.
            for answer in answers.result():
                error_of(answer)
        assert pids_with(marker) == []
        while connections(daemon) == before or not node_serves(daemon):
            made = client.post("/v1/sandboxes", json={"image": "busybox"})
            if made.status_code != 201:
                error_of(made)
            elif (deleted := client.delete(made.headers["Location"])).status_code != 204:
                error_of(deleted)
    for sandbox in sandboxes:
        answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": ["true"]})
        assert error_of(answer)["code"] == "sandbox-lost"
        seen = daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
        assert (seen["state"], seen["failure"]["cause"]) == ("failed", "node")
        daemon.delete(sandbox)
    use_it(daemon)


@pytest.mark.parametrize("victim", [launcher_of, zygote_of], ids=["launcher", "zygote"])
def test_what_waits_for_a_session_or_a_process_is_told_of_the_nodes_death(
    start_daemon: StartDaemon, victim: Callable[[Daemon], int]
):
    """Their ends are the launcher's to tell, and it may be the one that died."""
    daemon = start_daemon()
    marker = new_marker()
    sandbox = daemon.create("busybox")
    before = connections(daemon)
    url = f"/v1/sandboxes/{sandbox}"
    with client_of(daemon, timeout_s=60) as client:
        session = client.post(f"{url}/sessions", json={}).json()["id"]
        body = {"command": ["sleep", marker]}
        process = client.post(f"{url}/processes", json=body).json()["id"]

        def ask(path: str) -> httpx.Response:
            if path.startswith("sessions"):
                return client.post(f"{url}/{path}", json={"command": f"sleep {marker}"})
            return client.get(f"{url}/{path}", params={"wait_s": 50, "stdout_offset": 0})

        paths = [f"sessions/{session}/exec", f"processes/{process}"]
        with in_background(lambda: at_once(ask, paths, threads=2)) as answers:
            wait_for_marker(marker, count=2)
            os.kill(victim(daemon), signal.SIGKILL)
            in_session, in_process = answers.result()
        assert error_of(in_session)["code"] == "sandbox-lost"
        seen = in_process.json()
        assert (seen["state"], seen["error"]["code"]) == ("failed", "sandbox-lost"), seen
        assert (seen["exit_code"], seen["signal"]) == (None, None)
    wait_for(lambda: connections(daemon) > before and node_serves(daemon), "another node")
    daemon.delete(sandbox)


def test_a_killed_hostd_ends_the_daemon_and_nothing_stays(start_daemon: StartDaemon):
    """Only root could start hostd again, and the API is not: it ends, for systemd to start all."""
    daemon = start_daemon()
    marker = new_marker()
    sandbox = daemon.create("busybox")
    daemon.exec(sandbox, f"setsid sleep {marker} & true")
    family = daemon.refresh_family()
    os.kill(hostd_of(daemon), signal.SIGKILL)
    for pid in family - {daemon.pid}:
        wait_for_end(pid)
    assert daemon.process.wait(30) != 0
    assert pids_with(marker) == []
    with started_again(daemon) as again:
        use_it(again)


@pytest.mark.parametrize("worker", [1, 2, 3])
def test_a_killed_worker_of_the_launcher_is_replaced(start_daemon: StartDaemon, worker: int):
    daemon = start_daemon()
    use_it(daemon)
    workers = family_with(daemon.refresh_family(), "sandboxd.launcher")[1:]
    if worker > len(workers):
        pytest.skip("the launcher has fewer workers")
    with daemon.sandbox("busybox") as sandbox:
        os.kill(workers[worker - 1], signal.SIGKILL)
        wait_for_end(workers[worker - 1])
        assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
        use_it(daemon)
    use_it(daemon)


def test_a_pid_1_that_dies_takes_its_sandbox_and_no_other(start_daemon: StartDaemon):
    daemon = start_daemon()
    marker = new_marker()
    with daemon.sandbox("busybox") as other, client_of(daemon) as client:
        sandbox = daemon.create("busybox")
        daemon.exec(sandbox, f"sleep {marker} & true")

        def run() -> httpx.Response:
            command = {"command": "sleep 1000", "timeout_s": 100}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        with in_background(run) as answer:
            (orphan,) = pids_with(marker)
            wait_for(lambda: status_of(orphan)["PPid"] != "0", "a parent")
            os.kill(int(status_of(orphan)["PPid"]), signal.SIGKILL)
            response = answer.result()
        assert response.status_code == 410, response.text
        error = response.json()["error"]
        # Whoever did it: no exit code, and nothing that pays to be tried again.
        assert (error["code"], error["cause"], error["retryable"]) == (
            "sandbox-dead", "workload", False,
        )  # fmt: skip
        seen = daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
        assert (seen["state"], seen["failure"]["code"]) == ("failed", "sandbox-dead")
        daemon.delete(sandbox)
        assert daemon.exec(other, ["echo", "alive"])["stdout"] == "alive\n"
