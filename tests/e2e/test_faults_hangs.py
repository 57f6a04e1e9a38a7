"""A part of the node that is stopped for good is found, named and ended, and a node stands again.

`hang_s` is a short one here. That what is stopped for less is spared is the business of
`test_faults_at_random`, which stops everything for up to a second under the default.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.at_once import client_of, in_background
from tests.e2e.host_processes import (
    command_line,
    family_with,
    new_marker,
    pids_with,
    status_of,
    wait_for,
    wait_for_end,
    wait_for_marker,
)
from tests.e2e.restarts import running_node, start_node, started_again, wait_end
from tests.framework import host_state, internet
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.internet import EVIL, GOOD
from tests.framework.leaks import LeakCheck
from tests.framework.networks import SETTINGS, lookup, tcp
from tests.framework.networks import part_of as part_of_network

StartDaemon = Callable[..., Daemon]
QUICK = {"SANDBOXD_HANG_S": "2"}


def part_of(daemon: Daemon, name: str) -> int:
    """The eldest process of the node with `name` in its command line."""
    return family_with(daemon.refresh_family(), name)[0]


def connections(daemon: Daemon) -> int:
    told = daemon.http.get("/v1/events", params={"kind": "node-connected"}).text
    return told.count('"node-connected"')


@pytest.mark.parametrize(
    ("part", "named"),
    [("sandboxd.launcher", "the launcher"), ("init zygote", "the zygote")],
    ids=["launcher", "zygote"],
)
def test_a_stopped_part_is_named_and_the_node_serves_again(
    start_daemon: StartDaemon, part: str, named: str
):
    daemon = start_daemon(environment=QUICK)
    marker = new_marker()
    sandbox = daemon.create("busybox")
    before = connections(daemon)
    with client_of(daemon) as client:

        def run() -> dict[str, object]:
            command = {"command": ["sleep", marker], "timeout_s": 100}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command).json()["error"]

        with in_background(run) as answer:
            wait_for_marker(marker)
            victim = part_of(daemon, part)
            os.kill(victim, signal.SIGSTOP)
            wait_for_end(victim)
            error = answer.result(timeout=60)
        assert (error["code"], error["cause"], error["retryable"]) == ("sandbox-lost", "node", True)
    assert pids_with(marker) == []
    assert f"{named} does not answer for 2 s; killed" in daemon.log_file.read_text()
    wait_for(lambda: connections(daemon) > before, "another node")
    daemon.delete(sandbox)
    with daemon.sandbox("busybox") as fresh:
        assert daemon.exec(fresh, ["echo", "on"])["stdout"] == "on\n"


def test_stopped_workers_of_the_launcher_are_replaced(start_daemon: StartDaemon):
    """Undertaker, copier and spooler; those that mount are given up one by one, by their lanes."""
    daemon = start_daemon(environment=QUICK)
    workers = family_with(daemon.refresh_family(), "sandboxd.launcher")[3:6]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    for pid in workers:
        wait_for_end(pid)
    told = daemon.log_file.read_text()
    for name in ("undertaker", "copier", "spooler"):
        assert f"the {name} is stopped for 2 s; killed" in told
    with daemon.sandbox("busybox") as sandbox:
        url = f"/v1/sandboxes/{sandbox}"
        body = {"command": ["echo", "on"]}
        process = daemon.http.post(f"{url}/processes", json=body).json()["id"]
        query = {"wait_s": 20, "stdout_offset": 0}
        wait_for(
            lambda: (
                daemon.http.get(f"{url}/processes/{process}", params=query).json()["stdout"]["data"]
                == "on\n"
            ),
            "its output",
        )
        taken = daemon.http.post(f"{url}/snapshots", json={"on_running": "copy"})
        assert taken.status_code == 201, taken.text
        daemon.http.delete(f"/v1/snapshots/{taken.json()['id']}")


def test_a_stopped_host_helper_is_ended_and_so_is_its_daemon(start_daemon: StartDaemon):
    daemon = start_daemon(environment=QUICK)
    marker = new_marker()
    daemon.exec(daemon.create("busybox"), f"setsid sleep {marker} & true")
    family = daemon.refresh_family()
    os.kill(part_of(daemon, "sandboxd.host"), signal.SIGSTOP)
    assert wait_end(daemon.process) != 0
    for pid in family - {daemon.pid}:
        wait_for_end(pid)
    assert pids_with(marker) == []
    assert "hostd: it does not go on for 2 s; killed" in daemon.log_file.read_text()
    with started_again(daemon) as again, again.sandbox("busybox") as fresh:
        assert again.exec(fresh, ["echo", "on"])["stdout"] == "on\n"


def test_a_stopped_node_that_is_a_unit_is_ended(leak_check: LeakCheck, busybox: Path):
    """For systemd to start anew, which knows only of its end."""
    with running_node(leak_check, {"busybox": busybox}, QUICK) as node:
        parts = [p.pid for p in host_state.process_table()[node.process.pid].descendants()]
        node.process.send_signal(signal.SIGSTOP)
        assert wait_end(node.process) == -signal.SIGKILL
        for pid in parts:
            wait_for_end(pid)
        assert "hostd: it does not go on for 2 s; killed" in node.log
        node.notices.close()
        again = start_node(node.home, node.environment)
        node.process, node.notices = again.process, again.notices
        node.wait_notice("READY=1")


def test_a_guard_that_was_killed_is_replaced(start_daemon: StartDaemon):
    daemon = start_daemon(environment=QUICK)
    first = part_of(daemon, "sandboxd.guard")
    os.kill(first, signal.SIGKILL)

    def is_replaced() -> bool:
        found = family_with(daemon.refresh_family(), "sandboxd.guard")
        return bool(found) and first not in found

    wait_for(is_replaced, "another guard")
    os.kill(part_of(daemon, "sandboxd.host"), signal.SIGSTOP)
    assert wait_end(daemon.process) != 0
    with started_again(daemon):
        pass  # which takes the rest away


def test_a_node_that_was_suspended_as_a_whole_goes_on(start_daemon: StartDaemon):
    """As by `scontrol suspend`, for longer than any of it may hang: nobody was heard of, as nobody
    was there to listen."""
    daemon = start_daemon(environment=QUICK)
    with daemon.sandbox("busybox") as sandbox:
        before = connections(daemon)
        family = daemon.refresh_family()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            # Of the suspension, and then of what whoever watches makes of it.
            threading.Event().wait(2 * float(QUICK["SANDBOXD_HANG_S"]))
        assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
        assert connections(daemon) == before
    assert "killed" not in daemon.log_file.read_text()


@pytest.mark.parametrize("part", ["router", "resolver"])
def test_a_stopped_part_of_the_network_is_replaced(leak_check: LeakCheck, busybox: Path, part: str):
    """Each sandbox gets its link again, as when it dies."""
    with internet.running() as world:
        settings = SETTINGS | QUICK
        images = {"busybox": busybox}
        with running_daemon(leak_check, images, (), settings, world.enter) as daemon:
            with daemon.sandbox("busybox", network={"allow": ["example.org:80"]}) as box:
                assert tcp(daemon, box, "example.org", 80) == f"{GOOD}:80"
                victim = part_of_network(daemon, part)
                os.kill(victim, signal.SIGSTOP)
                wait_for_end(victim)
                assert f"the {part} does not answer for 2 s" in daemon.log_file.read_text()
                wait_for(lambda: lookup(daemon, box, "example.org") == [GOOD], "the network")
                assert tcp(daemon, box, GOOD, 80) == f"{GOOD}:80"
                assert tcp(daemon, box, EVIL, 80) == ""
                daemon.refresh_family()


PARTS = (
    *("sandboxd.host", "sandboxd.launcher", "sandboxd.views", "sandboxd.guard"),
    *("init zygote", "squashfuse_ll"),
)


def test_what_slurm_sends_to_every_process_ends_none_but_the_daemon(start_daemon: StartDaemon):
    """Which has answers to give before its node goes down. What runs in sandboxes gets it as well:
    nobody can take that from Slurm."""
    daemon = start_daemon()
    with daemon.sandbox("busybox") as sandbox:
        family = daemon.refresh_family()
        parts = {name: part_of(daemon, name) for name in PARTS}
        for number in (signal.SIGTERM, signal.SIGINT):
            for pid in family - {daemon.pid}:
                with suppress(ProcessLookupError):  # a worker that had done its work
                    os.kill(pid, number)
        assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
        for name, pid in parts.items():
            assert name in command_line(pid)
            assert int(status_of(pid)["ShdPnd"], 16) == 0  # it has taken both
    with daemon.sandbox("busybox") as fresh:
        assert daemon.exec(fresh, ["echo", "on"])["stdout"] == "on\n"


def test_a_node_that_watches_nothing_serves(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_HANG_S": "0"})
    assert family_with(daemon.refresh_family(), "sandboxd.guard") == []
    with daemon.sandbox("busybox") as fresh:
        assert daemon.exec(fresh, ["echo", "on"])["stdout"] == "on\n"
