"""Every process of a node is killed at once, with live sandboxes of every kind: the host as before.

What is left then is the kernel's: cgroups, an nftables table. All else (namespaces, mounts, FUSE
connections, loop devices, links) ends with the last process that held it, and is looked at too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.host_processes import new_marker, pids_with, wait_for, wait_for_end
from tests.e2e.restarts import Node, running_node, start_node
from tests.framework import host_state, internet
from tests.framework.daemon import Daemon
from tests.framework.internet import GOOD, Internet
from tests.framework.leaks import LeakCheck
from tests.framework.networks import SETTINGS, tcp

pytestmark = pytest.mark.needs("loop")


@pytest.fixture(scope="module")
def world() -> Iterator[Internet]:
    with internet.running() as found:
        yield found


def fill(daemon: Daemon, shared: Path, marker: str) -> None:
    """Sandboxes of every kind, each with something that lives in it."""

    def post(path: str, **body: Any) -> dict[str, Any]:
        answer = daemon.http.post(path, json=body)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def live(sandbox: str) -> str:
        daemon.exec(sandbox, f"trap '' TERM; setsid sleep {marker} & true")
        return f"/v1/sandboxes/{sandbox}"

    networked = live(daemon.create("busybox", network={"allow": [f"{GOOD}:80"]}))
    assert tcp(daemon, networked.rpartition("/")[2], GOOD, 80) == f"{GOOD}:80"
    mounted = [{"source": str(shared), "target": "/data"}]
    live(daemon.create("busybox", mounts=mounted))
    busy = live(daemon.create("busybox"))
    post(f"{busy}/sessions")
    post(f"{busy}/processes", command=["sleep", marker], tty={"rows": 24, "cols": 80})
    post(f"{busy}/processes", command=["cat"], stdin=True)
    taken = post(f"{busy}/snapshots", on_running="copy")["id"]
    live(post("/v1/sandboxes", snapshot=taken)["id"])
    post(f"{live(daemon.create('busybox'))}/reset")
    post(f"{live(daemon.create('busybox'))}/pause")


def kill_all(node: Node, daemon: Daemon) -> set[int]:
    """Stopped first, so that none can take another down in an orderly way."""
    family = {node.process.pid, daemon.pid}
    table = host_state.process_table()
    for pid in tuple(family):
        family |= {one.pid for one in table[pid].descendants()}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    daemon.http.close()
    daemon.process.wait()
    node.process.wait()
    for pid in family:
        wait_for_end(pid)
    return family


def groups_of(node: Node) -> list[str]:
    found = []
    for hierarchy in host_state.cgroup_mounts():
        found += [path for path, _, _ in os.walk(hierarchy) if node.home.name in path]
    return found


def loops() -> set[str]:
    """Loop devices that have a file behind them."""
    return {one.name for one in Path("/sys/block").glob("loop*") if (one / "loop").is_dir()}


def begin(node: Node, world: Internet, **settings: str) -> None:
    """Another life of the node, in the place of the one before."""
    node.notices.close()
    again = start_node(node.home, node.environment | settings, world.enter)
    node.process, node.notices = again.process, again.notices
    node.wait_notice("READY=1")


def sweep(node: Node, world: Internet, *arguments: str) -> list[str]:
    command = [*world.enter, sys.executable, "-m", "sandboxd", "sweep", *arguments]
    command += ["--runtime-dir", str(node.home / "run"), "--state-dir", str(node.home / "state")]
    environment = {"PATH": os.environ["PATH"], **node.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("layer", "then"), [("tmpfs", "sweep"), ("ext4", "start")])
def test_nothing_is_left_of_a_node_that_was_killed_whole(  # noqa: PLR0917 - each a fixture
    leak_check: LeakCheck,
    busybox: Path,
    world: Internet,
    tmp_path: Path,
    layer: str,
    then: str,
):
    settings = {
        **SETTINGS,
        "SANDBOXD_WRITABLE_LAYER": layer,
        "SANDBOXD_MOUNT_ROOTS": str(tmp_path),
    }
    before = loops()
    tables, links, routes = world.tables(), world.links(), world.routes()
    marker = new_marker()
    images = {"busybox": busybox}
    with running_node(leak_check, images, settings, network=world.enter) as node:
        daemon = node.serve()
        fill(daemon, tmp_path, marker)
        # The controls: what a crash could leave is there.
        assert len(pids_with(marker)) >= 6
        assert layer != "ext4" or loops() > before
        assert len(world.links()) > len(links)
        kill_all(node, daemon)
        assert pids_with(marker) == []
        assert groups_of(node), "the crash has left no cgroup: there is nothing to test"
        assert len(world.tables()) > len(tables)
        if then == "sweep":
            told = sweep(node, world, "--dry-run")
            assert {line.split()[0] for line in told} >= {"cgroup", "nft", "file"}
            # A link may go by itself in between.
            assert set(sweep(node, world)) <= set(told)
            assert sweep(node, world) == []
        else:
            # Without a network this time: what another life had is not of this one's settings.
            begin(node, world, SANDBOXD_NETWORK_POOL="")
            node.process.terminate()
            node.process.wait(30)
        wait_for(lambda: groups_of(node) == [], "no cgroup")
        assert sorted(path.name for path in (node.home / "run").iterdir()) == [
            "api.lock",
            "node.lock",
        ]
        wait_for(lambda: loops() <= before, "no loop device")
        wait_for(lambda: world.links() == links, "no link")
        assert (world.tables(), world.routes()) == (tables, routes)
        begin(node, world)
        again = node.serve()
        with again.sandbox("busybox") as box:
            assert again.exec(box, ["echo", "on"])["stdout"] == "on\n"
