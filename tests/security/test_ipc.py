"""Ways to talk past the walls: none leads to another sandbox or to the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework.daemon import Daemon
from tests.security.probing import Host, Inside, install


@pytest.fixture
def neighbour(daemon: Daemon, programs: dict[str, Path]) -> Iterator[Inside]:
    with daemon.sandbox("busybox") as name:
        install(daemon, name, programs)
        yield Inside(daemon, name, "root")


@pytest.mark.parametrize("mode", ["shm", "semaphores", "messages"])
def test_system_v_ipc_of_another_sandbox_is_not_seen(
    mode: str, as_root: Inside, neighbour: Inside
) -> None:
    name = {"shm": "shm", "semaphores": "sem", "messages": "msg"}[mode]
    neighbour.hog(mode, 2)
    assert len(neighbour.shell(f"cat /proc/sysvipc/{name}").splitlines()) > 1  # the control
    assert len(as_root.shell(f"cat /proc/sysvipc/{name}").splitlines()) == 1
    assert name not in Path(f"/proc/sysvipc/{name}").read_text().splitlines()[1:]


def test_system_v_ipc_of_the_host_is_not_seen(inside: Inside) -> None:
    for name in ("shm", "sem", "msg"):
        assert len(inside.shell(f"cat /proc/sysvipc/{name}").splitlines()) == 1


def test_posix_queue_of_another_sandbox_is_not_seen(as_root: Inside, neighbour: Inside) -> None:
    neighbour.hog("queues", 1)
    assert neighbour.shell("ls /dev/mqueue") == "q0\n"
    assert as_root.shell("ls /dev/mqueue") == ""


def test_posix_shared_memory_of_another_sandbox_is_not_seen(
    as_root: Inside, neighbour: Inside
) -> None:
    neighbour.shell("echo x >/dev/shm/named")
    assert neighbour.shell("ls /dev/shm") == "named\n"
    assert "named" not in as_root.shell("ls /dev/shm")
    assert not Path("/dev/shm/named").exists()


def test_abstract_socket_of_the_host_is_not_reached(inside: Inside, host: Host) -> None:
    name = f"sandboxd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        assert host.ask(f"connect_unix:@{name}") == "ok 0"
        assert inside.ask(f"connect_unix:@{name}") == "ECONNREFUSED"
        assert name not in inside.shell("cat /proc/net/unix")


def test_named_socket_of_the_daemon_is_not_there(
    inside: Inside, daemon: Daemon, host: Host
) -> None:
    path = daemon.runtime_dir / "launcher.sock"
    assert path.exists()
    assert inside.ask(f"connect_unix:{path}") == "ENOENT"
    assert inside.ask("connect_unix:/run/sandboxd/launcher.sock") == "ENOENT"
    assert host.ask(f"connect_unix:{path}") in ("EPROTOTYPE", "ok 0")


def test_launcher_socket_is_closed_to_ordinary_users(daemon: Daemon) -> None:
    status = (daemon.runtime_dir / "launcher.sock").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_uid == os.stat(f"/proc/{daemon.api_pid}").st_uid or status.st_uid != 0


def test_files_of_another_sandbox_are_not_seen(as_root: Inside, neighbour: Inside) -> None:
    neighbour.shell("echo secret >/work/secret; echo secret >/tmp/secret")
    assert neighbour.shell("cat /work/secret") == "secret\n"
    assert as_root.shell("cat /work/secret /tmp/secret") == ""


def test_processes_of_another_sandbox_are_not_seen(as_root: Inside, neighbour: Inside) -> None:
    neighbour.shell("sleep 77 >/dev/null 2>&1 &")
    assert "sleep 77" in neighbour.shell("ps")
    assert "sleep 77" not in as_root.shell("ps")


def test_lock_on_a_file_of_the_image_is_the_sandboxs_own(
    as_root: Inside, neighbour: Inside
) -> None:
    """One SIF is below all sandboxes of it: a lock is on the overlay's inode, not on the SIF's."""
    assert neighbour.hold("lock") == (1, "EALREADY")
    assert neighbour.hog("lock") == (0, "EAGAIN")  # the control
    assert as_root.hog("lock") == (1, "EALREADY")


def test_shared_signals_do_not_cross(as_root: Inside, neighbour: Inside) -> None:
    neighbour.shell("sleep 78 >/dev/null 2>&1 &")
    as_root.shell("kill -9 -1")
    assert "sleep 78" in neighbour.shell("ps")
