"""squashfuse is killed or stopped: named errors, no wedged mount, no reader that cannot be killed.

A stopped server is found by the launcher's watch, which asks each server every 5 s and gives it
10 s to answer; the bounds here leave that and a slow machine's share.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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
from tests.e2e.refusals import refusal
from tests.framework import host_state
from tests.framework.daemon import Daemon

StartDaemon = Callable[..., Daemon]
SMALL = {"limits": {"memory_mb": 64, "disk_mb": 16, "pids": 32}}


def servers_of(daemon: Daemon) -> list[int]:
    """The servers of images, in the order in which they were started."""
    return family_with(daemon.refresh_family(), "squashfuse_ll")


def sandbox_lost(answer: httpx.Response) -> None:
    refusal(answer, 410, "sandbox-lost", "node", retryable=True)


def use_it(daemon: Daemon, image: str = "busybox") -> None:
    with daemon.sandbox(image) as sandbox:
        assert daemon.exec(sandbox, "echo $((6 * 7))")["stdout"] == "42\n"


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: status_of(pid)["State"].startswith("T"), "a stopped server")
        yield
    finally:
        # Whatever the test found: nobody may wait for it for ever.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("count", [1, 150])
def test_a_killed_server_fails_its_sandboxes_by_name_and_the_next_one_works(
    start_daemon: StartDaemon, count: int
):
    daemon = start_daemon()
    marker = new_marker()
    with client_of(daemon) as client:

        def make(_: int) -> str:
            answer = client.post("/v1/sandboxes", json={"image": "busybox", **SMALL})
            assert answer.status_code == 201, answer.text
            return str(answer.json()["id"])

        def run(sandbox: str) -> httpx.Response:
            command = {"command": ["sleep", marker], "timeout_s": 100}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        made = at_once(make, range(count), threads=min(count, 16))
        running = made[:40]
        with in_background(lambda: at_once(run, running, threads=len(running))) as answers:
            wait_for_marker(marker, count=len(running))
            (server,) = servers_of(daemon)
            os.kill(server, signal.SIGKILL)
            # At once: nobody need wait for a watch to find out.
            use_it(daemon)
            for answer in answers.result():
                sandbox_lost(answer)
        assert pids_with(marker) == []
        for sandbox in made:
            url = f"/v1/sandboxes/{sandbox}"
            sandbox_lost(client.post(f"{url}/exec", json={"command": ["true"]}))
            seen = client.get(url).json()
            assert (seen["state"], seen["failure"]["code"]) == ("failed", "sandbox-lost")
        deleted = at_once(lambda s: client.delete(f"/v1/sandboxes/{s}").status_code, made, 16)
    assert set(deleted) == {204}
    use_it(daemon)


def test_a_killed_server_during_reads_gives_errors_and_no_results(
    start_daemon: StartDaemon, bulky: Path
):
    daemon = start_daemon(images={"bulky": bulky})
    sandbox = daemon.create("bulky")
    marker = new_marker()
    with client_of(daemon) as client:

        def read_on() -> httpx.Response:
            command = f"cat /bulk/0 >/dev/null; while cat /bulk/* >/dev/null; do :; done # {marker}"
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": command})

        with in_background(read_on) as answer:
            wait_for_marker(marker)
            os.kill(servers_of(daemon)[0], signal.SIGKILL)
            sandbox_lost(answer.result())
        read = client.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/bulk/1"})
        sandbox_lost(read)
    daemon.delete(sandbox)
    use_it(daemon, "bulky")


def test_a_stopped_server_ends_a_reader_by_name_within_the_watchs_time(
    start_daemon: StartDaemon, bulky: Path
):
    daemon = start_daemon(images={"bulky": bulky})
    sandbox = daemon.create("bulky")
    marker = new_marker()
    assert daemon.exec(sandbox, ["true"])["exit_code"] == 0
    with client_of(daemon) as client:

        def read_on() -> httpx.Response:
            command = {"command": f"cat /bulk/0 | wc -c # {marker}", "timeout_s": 90}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        (server,) = servers_of(daemon)
        with stopped(server), in_background(read_on) as answer:
            sandbox_lost(answer.result(timeout=40))
            wait_for_end(server)
        assert pids_with(marker) == []
    daemon.delete(sandbox)
    with daemon.sandbox("bulky") as again:
        assert daemon.exec(again, "cat /bulk/0 | wc -c")["stdout"] == "4194304\n"


def test_a_time_out_while_the_server_hangs_is_the_nodes(start_daemon: StartDaemon):
    """Before the watch has found out. Positive control: the same with a server that answers."""
    daemon = start_daemon()
    sandbox = daemon.create("busybox")
    marker = new_marker()
    with client_of(daemon) as client:

        def run() -> httpx.Response:
            command = {"command": ["sleep", marker], "timeout_s": 2}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        assert (run().json()["exit_code"], run().json()["timed_out"]) == (124, True)
        (server,) = servers_of(daemon)
        with in_background(run) as answer:
            wait_for_marker(marker)
            with stopped(server):
                refusal(answer.result(timeout=40), 503, "image-unavailable", "node", retryable=True)
                assert pids_with(marker) == []
    daemon.delete(sandbox)


def test_a_delete_does_not_wait_for_a_stopped_server_for_ever(
    start_daemon: StartDaemon, bulky: Path
):
    daemon = start_daemon(images={"bulky": bulky})
    sandbox = daemon.create("bulky")
    marker = new_marker()
    with client_of(daemon) as client:

        def read_on() -> httpx.Response:
            # Nobody has looked at /bulk yet: what comes first can only be told by the server.
            script = f"kill -STOP $$; cat /bulk/* > /dev/null # {marker}"
            command = {"command": script, "timeout_s": 90}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        with in_background(read_on) as answer:
            wait_for(lambda: state_of(marker).startswith("T"), "a reader that is about to begin")
            (server,) = servers_of(daemon)
            with stopped(server):
                (reader,) = pids_with(marker)
                os.kill(reader, signal.SIGCONT)
                wait_for(Standstill(reader).reached, "a reader that waits for it")
                daemon.delete(sandbox)
                assert pids_with(marker) == []
                error = answer.result(timeout=40).json()["error"]
                assert error["code"] in ("sandbox-dead", "sandbox-lost")
                wait_for_end(server)
    use_it(daemon, "bulky")


def state_of(marker: str) -> str:
    """Of the one process that has it in its command line; "" where there is none yet."""
    with suppress(OSError):
        for pid in pids_with(marker):
            return status_of(pid)["State"]
    return ""


class Standstill:
    """Whether nothing of a shell's family goes on: all sleep, and since the last look none has run.

    Not by the kernel's word on what they wait for: a request, a page and a look-up are waited for
    in different places, and not every kernel names them.
    """

    def __init__(self, shell: int) -> None:
        self._shell = shell
        self._last: dict[int, tuple[str, str]] = {}

    def reached(self) -> bool:
        table = host_state.process_table()
        seen: dict[int, tuple[str, str]] = {}
        family = table[self._shell].descendants() if self._shell in table else []
        for pid in [self._shell, *(one.pid for one in family)]:
            with suppress(OSError):
                status = status_of(pid)
                seen[pid] = (status["State"][0], status["voluntary_ctxt_switches"])
        last, self._last = self._last, seen
        sleeps = bool(seen) and all(state in "SD" for state, _ in seen.values())
        return sleeps and seen == last


def test_a_stopped_server_holds_up_no_other_image(
    start_daemon: StartDaemon, busybox: Path, bulky: Path
):
    """Also while somebody asks for a sandbox of the stopped one, whose mount blocks."""
    daemon = start_daemon(images={"bulky": bulky, "busybox": busybox})
    daemon.warm_up("bulky")
    (stopped_server,) = servers_of(daemon)
    daemon.warm_up("busybox")
    (healthy_server,) = set(servers_of(daemon)) - {stopped_server}
    neighbour = daemon.create("busybox")
    with client_of(daemon) as client:

        def make(image: str) -> httpx.Response:
            return client.post("/v1/sandboxes", json={"image": image})

        with stopped(stopped_server):
            with in_background(lambda: at_once(make, ["bulky"] * 3, threads=3)) as blocked:
                made = at_once(make, ["busybox"] * 6, threads=6)
                for answer in made:
                    assert answer.status_code == 201, answer.text
                    sandbox = answer.json()["id"]
                    assert daemon.exec(sandbox, ["echo", "ok"])["stdout"] == "ok\n"
                    daemon.delete(sandbox)
                for answer in blocked.result():
                    if answer.status_code == 201:  # made before it was stopped for good
                        daemon.delete(answer.json()["id"])
                        continue
                    error: dict[str, Any] = answer.json()["error"]
                    assert (error["cause"], error["retryable"]) == ("node", True), error
            wait_for_end(stopped_server)
    # The healthy one was not taken for the stopped one.
    assert Path(f"/proc/{healthy_server}").exists()
    assert daemon.exec(neighbour, ["cat", "/etc/group"])["exit_code"] == 0
    daemon.delete(neighbour)
    use_it(daemon, "bulky")
    use_it(daemon, "busybox")


def test_a_server_stopped_for_a_moment_costs_nothing_but_that_moment(
    start_daemon: StartDaemon, bulky: Path
):
    daemon = start_daemon(images={"bulky": bulky})
    with daemon.sandbox("bulky") as sandbox, client_of(daemon) as client:
        daemon.exec(sandbox, ["true"])

        def read_on() -> httpx.Response:
            command = {"command": "cat /bulk/2 | wc -c", "timeout_s": 60}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        (server,) = servers_of(daemon)
        with in_background(read_on) as answer:
            with stopped(server):
                assert not answer.done() or answer.result().json()["exit_code"] == 0
            assert answer.result().json()["stdout"] == "4194304\n"
        assert servers_of(daemon) == [server]
