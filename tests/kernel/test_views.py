"""One view server for a whole node: what it takes, and that each name shows its own."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.host.ids import FUSE_ID, MAPPED_IDS, NODE_ID
from sandboxd.launcher import protocol
from sandboxd.linux import child, mount, namespaces
from tests.framework import host_state

pytestmark = pytest.mark.needs("root", "namespaces", "fuse")

SANDBOXES = 500
MEMORY_MAX_KB = 100_000
FIGURES = {
    "memory.usage": "16777216\n",
    "memory.stat": "cache 8192\nrss 4096\nshmem 2048\n",
    "pids": "4\n",
    "cpu.stat": "user_usec 2000000\nsystem_usec 1000000\n",
}
FILES = ("meminfo", "cpuinfo", "stat", "loadavg", "uptime", "swaps", "cpu/online")


@pytest.fixture
def home() -> Iterator[Path]:
    """Not below pytest's own directory, which is closed to ids that are not root's."""
    with tempfile.TemporaryDirectory(prefix=host_state.OWN_PREFIX) as name:
        os.chmod(name, 0o755)
        Path(name, "mnt").mkdir()
        for file, text in FIGURES.items():
            Path(name, file).write_text(text)
        yield Path(name)


def test_a_node_full_of_sandboxes_is_served_in_little_memory(home: Path) -> None:
    point = home / "mnt"
    gate, ready = socket.socketpair()

    def stand() -> None:
        """In the launcher's place: it has the namespaces and the directory to mount at."""
        gate.close()
        mount.mount("images", point, "tmpfs", 0, "mode=0755")
        (point / "p1").mkdir()
        ready.send(b"m")
        ready.recv(1)

    def map_ids(pid: int) -> None:
        ids = [(0, 2_000_000_000, MAPPED_IDS)]
        namespaces.write_id_map(pid, ids, ids)

    flags = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS
    with gate, ready, child.running(stand, flags, map_ids) as standing:
        assert gate.recv(1) == b"m"
        user, mnt = (namespaces.open_namespace(standing.pid, kind) for kind in ("user", "mnt"))
        # After the fork: a copy of our end would keep the server alive.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sources = (theirs.fileno(), user, mnt)
        arguments = [str(point / "p1"), str(NODE_ID), str(FUSE_ID)]
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "sandboxd.views", *arguments],
            os.environ,
            # Above the targets first: a target may be one of the sources.
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, fd, 100 + i) for i, fd in enumerate(sources)),
                *((os.POSIX_SPAWN_DUP2, 100 + i, 3 + i) for i in range(3)),
                *((os.POSIX_SPAWN_CLOSE, 100 + i) for i in range(3)),
            ],
        )
        theirs.close()
        try:
            ours.settimeout(20)
            assert protocol.receive(ours)[0] == {"event": "serving"}
            serve_all(ours, home, point / "p1", pid, (user, mnt))
        finally:
            ours.close()
            # By itself, once the launcher is gone.
            assert os.waitpid(pid, 0)[1] == 0
            os.close(user)
            os.close(mnt)


def serve_all(
    sock: socket.socket, home: Path, point: Path, pid: int, inside: tuple[int, int]
) -> None:
    user, mnt = inside
    names = [f"{number:016x}" for number in range(SANDBOXES)]
    cpus = sorted(os.sched_getaffinity(0))[:1]
    for number, name in enumerate(names):
        fds = tuple(os.open(home / file, os.O_RDONLY) for file in FIGURES)
        protocol.send(sock, {"op": "add", "name": name, "files": list(FIGURES)}, fds)
        for fd in fds:
            os.close(fd)
        told = {"memory_kb": 1000 + number, "disk_kb": 0, "started_s": 0.0, "started_at": 0.0}
        told |= {"quota_us": 100_000, "cpu_weight": 100, "pids": 64}
        protocol.send(sock, {"op": "tell", "name": name, "cpus": cpus, **told})

    def read_all() -> list[str]:
        """As one inside; to all others of the host this file system is closed."""
        namespaces.setns(user, namespaces.CLONE_NEWUSER)
        namespaces.setns(mnt, namespaces.CLONE_NEWNS)
        child.become_root()
        totals = []
        for name in names:
            texts = [(point / name / file).read_text() for file in FILES]
            assert all(texts), name
            totals.append(texts[0].split()[1])
        return totals

    assert child.run(read_all, 60) == [str(1000 + number) for number in range(SANDBOXES)]
    status = Path(f"/proc/{pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    print(peak)
    assert int(peak.split()[1]) < MEMORY_MAX_KB
