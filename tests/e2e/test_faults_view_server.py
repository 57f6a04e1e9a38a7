"""The view server is killed, stopped, kept from starting: nothing hangs, and views come back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.at_once import client_of, in_background
from tests.e2e.host_processes import (
    family_with,
    new_marker,
    pids_with,
    status_of,
    wait_for,
    wait_for_end,
    wait_for_marker,
)
from tests.framework.daemon import Daemon

StartDaemon = Callable[..., Daemon]
LIMITS = {"cpus": 1, "memory_mb": 96, "disk_mb": 16}
TOTAL = f"MemTotal: {96 * 1024:>14} kB\n"
READ = "head -n1 /proc/meminfo"
GONE = ("not connected", "connection abort")


def server_of(daemon: Daemon) -> int:
    """The one that serves; while one is replaced, that one's successor."""
    found: list[int] = []

    def one() -> bool:
        found[:] = family_with(daemon.refresh_family(), "sandboxd.views")
        state = daemon.http.get("/v1/node").json()["features"]["proc_views"]
        return len(found) == 1 and state == "serving"

    wait_for(one, "a view server")
    return found[0]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: status_of(pid)["State"].startswith("T"), "a stopped server")
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def healed(daemon: Daemon, sandbox: str) -> None:
    """What the sandbox reads is its own again; until then each read says that nobody answers."""

    def is_right() -> bool:
        result = daemon.exec(sandbox, f"{READ}; cat /sys/devices/system/cpu/online", timeout_s=30)
        return result["exit_code"] == 0 and result["stdout"].startswith(TOTAL)

    wait_for(is_right, "views of a sandbox that was there before")


def test_a_killed_server_is_replaced_and_running_sandboxes_heal(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    made = [daemon.create("busybox", limits=LIMITS) for _ in range(5)]
    for _ in range(2):
        server = server_of(daemon)
        os.kill(server, signal.SIGKILL)
        wait_for_end(server)
        result = daemon.exec(made[0], READ)
        if result["stdout"] != TOTAL:
            assert result["exit_code"] == 1
            assert any(word in result["stderr"] for word in GONE), result
        for sandbox in made:
            healed(daemon, sandbox)
    # Mounts do not pile up: one of each file, of the server that serves.
    mounts = daemon.exec(made[0], "cut -d' ' -f5 /proc/self/mountinfo")["stdout"].split()
    assert mounts.count("/proc/meminfo") == 1
    assert mounts.count("/sys/devices/system/cpu") == 1
    for sandbox in made:
        daemon.delete(sandbox)
    with daemon.sandbox("busybox", limits=LIMITS) as fresh:
        assert daemon.exec(fresh, READ)["stdout"] == TOTAL


def test_a_stopped_server_holds_up_neither_creates_nor_deletes(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    sandbox = daemon.create("busybox", limits=LIMITS)
    marker = new_marker()
    server = server_of(daemon)
    with client_of(daemon) as client, stopped(server):

        def read_on() -> int:
            command = {"command": f"{READ} # {marker}", "timeout_s": 60}
            answer = client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)
            return int(answer.json()["exit_code"])

        with in_background(read_on) as answer:
            # More than there are slots ready: some are made while the server is stopped.
            for _ in range(8):
                with daemon.sandbox("busybox", limits=LIMITS) as other:
                    assert daemon.exec(other, ["echo", "ok"])["stdout"] == "ok\n"
            # A view that hangs ends with its server, and that within the watch's time.
            assert answer.result(timeout=30) in (0, 1)
        wait_for_end(server)
        assert pids_with(marker) == []
    healed(daemon, sandbox)
    daemon.delete(sandbox)


def test_a_sandbox_whose_readers_hang_is_deleted(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    sandbox = daemon.create("busybox", limits=LIMITS)
    marker = new_marker()
    server = server_of(daemon)
    with client_of(daemon) as client, stopped(server):

        def read_on() -> int:
            command = {"command": f"while :; do {READ}; done # {marker}", "timeout_s": 90}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command).status_code

        with in_background(read_on) as answer:
            wait_for_marker(marker)
            daemon.delete(sandbox)
            assert pids_with(marker) == []
            answer.result(timeout=40)
    server_of(daemon)


def test_a_server_stopped_for_a_moment_lives_on(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        server = server_of(daemon)
        with stopped(server):
            pass
        assert daemon.exec(sandbox, READ)["stdout"] == TOTAL
        assert server_of(daemon) == server


def test_a_server_that_cannot_start_leaves_a_node_that_says_so(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """As where pyfuse3 is not installed: its import fails."""
    (tmp_path / "pyfuse3.py").write_text("raise ImportError('not on this machine')\n")
    tmp_path.chmod(0o755)
    daemon = start_daemon(environment={"PYTHONPATH": str(tmp_path)})
    assert daemon.http.get("/v1/node").json()["features"]["proc_views"] == "down"
    assert "not on this machine" in daemon.log_tail(200)
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        result = daemon.exec(sandbox, f"{READ}; nproc")
        assert (result["exit_code"], result["stdout"].split()[-1]) == (0, "1")
        host = Path("/proc/meminfo").read_text().splitlines()[0]
        assert result["stdout"].splitlines()[0] == host
