"""Slots with a root made ahead of need: who gets one gets the same as anybody else, only sooner."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.host_processes import family_with, wait_for
from tests.framework.daemon import SLOTS, Daemon

StartDaemon = Callable[..., Daemon]
PRIMED = {"SANDBOXD_SLOTS_PRIMED": "2"}


@pytest.fixture
def primed_daemon(start_daemon: StartDaemon) -> Iterator[Daemon]:
    daemon = start_daemon(environment=PRIMED)
    yield daemon
    # As it was, for the leak check.
    assert daemon.http.delete("/v1/images/busybox").status_code == 204
    wait_for_nothing_primed(daemon)


def counts(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.http.get("/v1/node").json()["counts"]
    return found


def prime(daemon: Daemon, **body: object) -> None:
    """Ask for the same until a slot waits with it."""

    def primed() -> bool:
        create(daemon, **body)
        return counts(daemon)["slots_primed"] > 0

    wait_for(primed, "a primed slot")


def create(daemon: Daemon, **body: object) -> None:
    answer = daemon.http.post("/v1/sandboxes", json={"image": "busybox", **body})
    assert answer.status_code == 201, answer.text
    assert daemon.http.delete(f"/v1/sandboxes/{answer.json()['id']}").status_code == 204


def wait_for_nothing_primed(daemon: Daemon) -> None:
    """As many slots are ready as ever, and none of them holds anything."""

    def settled() -> bool:
        now = counts(daemon)
        return (now["slots_primed"], now["slots_ready"], now["in_teardown"]) == (0, SLOTS, 0)

    wait_for(settled, "slots that are not primed")


def test_the_same_again_has_its_root_already(primed_daemon: Daemon) -> None:
    limits = {"memory_mb": 96, "disk_mb": 7, "inodes": 321, "pids": 33}
    prime(primed_daemon, limits=limits)
    body = {"image": "busybox", "limits": limits}
    answer = primed_daemon.http.post("/v1/sandboxes", json=body).json()
    # Neither a root nor limits on the way.
    assert "launcher.slot" in answer["phases_ms"]
    assert not {"launcher.limits", "launcher.root"} & set(answer["phases_ms"])
    assert answer["limits"] | limits == answer["limits"]
    sandbox = answer["id"]
    told = primed_daemon.exec(sandbox, "df -k / | tail -1 | awk '{print $2}'; df -i / | tail -1")
    size_kb, inodes = told["stdout"].splitlines()
    assert size_kb == str(7 * 1024)
    assert 321 <= int(inodes.split()[1]) < 330, "the root's own few directories come on top"
    hog = "for i in $(seq 60); do sleep 5 & done; echo done"
    assert "can't fork" in primed_daemon.exec(sandbox, hog)["stderr"]
    assert primed_daemon.http.delete(f"/v1/sandboxes/{sandbox}").status_code == 204


def test_who_asks_for_something_else_gets_that(primed_daemon: Daemon) -> None:
    prime(primed_daemon)
    for _ in range(2 * SLOTS):  # more than there are slots: the primed ones are among them
        body = {"image": "busybox", "hostname": "other", "limits": {"disk_mb": 9}}
        answer = primed_daemon.http.post("/v1/sandboxes", json=body)
        sandbox = answer.json()["id"]
        told = primed_daemon.exec(sandbox, "hostname; df -k / | tail -1 | awk '{print $2}'")
        assert told["stdout"] == f"other\n{9 * 1024}\n"
        assert primed_daemon.http.delete(f"/v1/sandboxes/{sandbox}").status_code == 204


def test_nothing_of_one_is_in_the_next(primed_daemon: Daemon) -> None:
    prime(primed_daemon)
    for _ in range(2 * SLOTS):
        with primed_daemon.sandbox("busybox") as sandbox:
            look = "ls / /tmp /dev/shm | grep -c mark; touch /mark /tmp/mark /dev/shm/mark"
            assert primed_daemon.exec(sandbox, look)["stdout"] == "0\n"


def test_an_image_can_be_evicted_though_slots_have_it(primed_daemon: Daemon) -> None:
    prime(primed_daemon)
    assert primed_daemon.http.delete("/v1/images/busybox").status_code == 204
    assert counts(primed_daemon)["slots_primed"] == 0
    assert not family_with(primed_daemon.refresh_family(), "squashfuse_ll")
    create(primed_daemon)


def test_a_dead_image_server_takes_its_primed_slots_with_it(primed_daemon: Daemon) -> None:
    prime(primed_daemon)
    (server,) = family_with(primed_daemon.refresh_family(), "squashfuse_ll")
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: counts(primed_daemon)["slots_primed"] == 0, "no primed slot")
    with primed_daemon.sandbox("busybox") as sandbox:
        assert primed_daemon.exec(sandbox, ["true"])["exit_code"] == 0


def test_a_reset_may_use_one(primed_daemon: Daemon) -> None:
    prime(primed_daemon)
    with primed_daemon.sandbox("busybox") as sandbox:
        primed_daemon.exec(sandbox, "touch /mark")
        answer = primed_daemon.http.post(f"/v1/sandboxes/{sandbox}/reset", json={})
        assert answer.status_code == 200
        assert primed_daemon.exec(sandbox, "ls /mark")["exit_code"] == 1


def test_what_nobody_asks_for_again_is_let_go(primed_daemon: Daemon) -> None:
    prime(primed_daemon)
    wait_for_nothing_primed(primed_daemon)
