"""What a service manager does to a daemon: its socket, readiness, watchdog, restart and reload."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.at_once import at_once, client_of, in_background
from tests.e2e.host_processes import new_marker, status_of, wait_for, wait_for_marker
from tests.e2e.restarts import Node, running_node, wait_end
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck


@pytest.fixture
def node(leak_check: LeakCheck, busybox: Path) -> Iterator[Node]:
    with running_node(leak_check, {"busybox": busybox}) as node:
        yield node


class Manager:
    """The two sockets of a service manager: where requests wait, and where it is told things."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.path = node.home / "api-notices"
        self.heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heard.bind(str(self.path))
        account = pwd.getpwnam("sandboxd")
        for path in (self.path, node.home / "state"):
            os.chown(path, account.pw_uid, account.pw_gid)

    def start(self) -> Daemon:
        return self.node.serve_from(self.listener, self.path)

    def wait_for(self, text: str) -> str:
        self.heard.settimeout(60)
        while text not in (notice := self.heard.recv(4096).decode()):
            pass
        return notice


@pytest.fixture
def manager(node: Node) -> Iterator[Manager]:
    manager = Manager(node)
    yield manager
    manager.listener.close()
    manager.heard.close()


def test_a_restart_under_load_loses_no_request(manager: Manager):
    """Upgrade in place: what comes while there is no daemon waits in the socket."""
    first = manager.start()
    assert "all sandboxes are known" in manager.wait_for("READY=1")
    first.wait_ready()
    # As the account from the start, without any of root's rights.
    status = status_of(first.pid)
    assert status["Uid"].split()[0] == str(pwd.getpwnam("sandboxd").pw_uid)
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    sandboxes = [first.create("busybox") for _ in range(4)]
    marker = new_marker()
    with client_of(first) as client:
        command = {"command": ["sleep", marker]}
        path = f"/v1/sandboxes/{sandboxes[0]}/exec"
        with in_background(lambda: client.post(path, json=command)) as running:
            wait_for_marker(marker)
            first.process.terminate()
            manager.wait_for("STOPPING=1")

            def ask(sandbox: str) -> httpx.Response:
                # A connection of its own, made while nobody accepts any.
                headers = {"Authorization": f"Bearer {first.token}"}
                return httpx.post(
                    f"{first.base_url}/v1/sandboxes/{sandbox}/exec",
                    json={"command": ["echo", "alive"]},
                    headers=headers,
                    timeout=90,
                )

            with in_background(lambda: at_once(ask, sandboxes, threads=4)) as asked:
                assert running.result().json()["error"]["code"] == "node-unavailable"
                assert wait_end(first.process) == 0
                second = manager.start()
                manager.wait_for("READY=1")
                answers = asked.result()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [answer.json()["stdout"] for answer in answers] == ["alive\n"] * 4
    second.wait_ready()
    for sandbox in sandboxes:
        second.delete(sandbox)


def test_the_watchdog_is_fed_while_the_daemon_is_well_and_not_when_it_hangs(manager: Manager):
    daemon = manager.start()
    manager.wait_for("READY=1")
    for _ in range(3):
        manager.wait_for("WATCHDOG=1")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: status_of(daemon.pid)["State"].startswith("T"), "its standstill")
        manager.heard.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                manager.heard.recv(4096)  # what it had said before
        manager.heard.settimeout(3)  # longer than a watchdog of 2 s waits
        with pytest.raises(TimeoutError):
            manager.heard.recv(4096)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    manager.wait_for("WATCHDOG=1")


def test_a_reload_takes_over_what_it_can(node: Node):
    file = node.home / "sandboxd.toml"
    text = 'log_level = "info"\nmax_sandboxes = 2\nslots_max = 4\nslots_min = 4\n'
    file.write_text(text)
    file.chmod(0o644)
    # The fixtures' own settings would come before the file.
    daemon = node.serve("--config", str(file))

    def reload() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sandboxd", "reload", "--url", daemon.base_url]
        command += ["--token-file", str(daemon.state_dir / "token")]
        env = {k: v for k, v in os.environ.items() if not k.startswith("SANDBOXD_")}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    first = daemon.create("busybox")
    file.write_text(text.replace("= 2", "= 1").replace("slots_max = 4", "slots_max = 9"))
    done = reload()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["max_sandboxes", "2", "1"]
    refused = daemon.http.post("/v1/sandboxes", json={"image": "busybox"})
    assert refused.json()["error"]["code"] == "node-overloaded", refused.text
    # What is wrong is told with its line, and changes nothing.
    file.write_text("max_sandboxes = 5\n\nmax_sandbox = 3\n")
    done = reload()
    assert done.returncode == 1
    assert f"config-invalid: {file}:3: unknown key 'max_sandbox'" in done.stderr
    assert daemon.http.get("/v1/node").json()["max_sandboxes"] == 1
    os.kill(daemon.pid, signal.SIGHUP)
    wait_for(lambda: f"{file}:3: unknown key" in daemon.log_tail(), "a word in the log")
    assert daemon.http.get("/v1/node").json()["max_sandboxes"] == 1
    file.write_text(text)
    os.kill(daemon.pid, signal.SIGHUP)
    wait_for(lambda: daemon.http.get("/v1/node").json()["max_sandboxes"] == 2, "the reload")
    second = daemon.create("busybox")
    for sandbox in (first, second):
        daemon.delete(sandbox)
