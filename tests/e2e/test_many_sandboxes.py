"""Hundreds of sandboxes at once: made, used and deleted together, and nothing of them is left.

The leak check around each test is what counts; the answers are checked besides.
"""

from __future__ import annotations

import threading

import pytest

from tests.e2e.at_once import at_once, client_of
from tests.e2e.host_processes import pids_with
from tests.framework.daemon import Daemon

SANDBOXES = 200
SMALL = {"limits": {"memory_mb": 64, "disk_mb": 16, "pids": 32}}


@pytest.mark.timeout(240)
def test_two_hundred_at_once_are_made_used_and_deleted(daemon: Daemon):
    all_made = threading.Barrier(SANDBOXES, timeout=120)
    with client_of(daemon) as client:

        def live(n: int) -> tuple[int, str, int]:
            made = client.post("/v1/sandboxes", json={"image": "busybox", **SMALL})
            assert made.status_code == 201, made.text
            url = f"/v1/sandboxes/{made.json()['id']}"
            all_made.wait()
            script = f"echo {n} > /work/me; (sleep 4242 &); sleep 0.1; cat /work/me; exit {n % 200}"
            done = client.post(f"{url}/exec", json={"command": script, "timeout_s": 100})
            assert done.status_code == 200, done.text
            result = done.json()
            return result["exit_code"], result["stdout"], client.delete(url).status_code

        results = at_once(live, range(SANDBOXES), threads=SANDBOXES)
    assert results == [(n % 200, f"{n}\n", 204) for n in range(SANDBOXES)]
    assert daemon.http.get("/v1/sandboxes").json()["sandboxes"] == []


@pytest.mark.timeout(240)
def test_sandboxes_come_and_go_for_a_while_and_nothing_grows(daemon: Daemon):
    with client_of(daemon) as client:

        def short_life(n: int) -> tuple[str, int]:
            made = client.post("/v1/sandboxes", json={"image": "busybox", **SMALL})
            assert made.status_code == 201, made.text
            url = f"/v1/sandboxes/{made.json()['id']}"
            written = client.put(
                f"{url}/files", params={"path": "/work/n"}, content=str(n).encode()
            )
            assert written.status_code == 200, written.text
            done = client.post(f"{url}/exec", json={"command": ["cat", "/work/n"]})
            assert done.status_code == 200, done.text
            return done.json()["stdout"], client.delete(url).status_code

        results = at_once(short_life, range(300), threads=8)
    assert results == [(str(n), 204) for n in range(300)]


@pytest.mark.timeout(240)
def test_deleting_all_while_all_of_them_run_something_leaves_nothing(daemon: Daemon):
    count = 60
    running = threading.Barrier(2 * count, timeout=120)
    marker = "7355608"
    with client_of(daemon) as client:

        def run(n: int) -> int:
            if n % 2:
                running.wait()
                return client.delete(f"/v1/sandboxes/{made[n // 2]}").status_code
            running.wait()
            command = f"while :; do (sleep {marker} &); sleep 0.01; done"
            url = f"/v1/sandboxes/{made[n // 2]}/exec"
            answer = client.post(url, json={"command": command, "timeout_s": 60})
            assert answer.json()["error"]["code"] in ("sandbox-dead", "sandbox-not-found")
            return answer.status_code

        def make(_: int) -> str:
            return str(
                client.post("/v1/sandboxes", json={"image": "busybox", **SMALL}).json()["id"]
            )

        made = at_once(make, range(count), threads=20)
        statuses = at_once(run, range(2 * count), threads=2 * count)
    assert set(statuses[1::2]) == {204}
    assert set(statuses[::2]) <= {410, 404}
    assert pids_with(marker) == []
