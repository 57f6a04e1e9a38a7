"""Who each process is on the host: nobody who matters, and no more than it needs."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from tests.e2e.host_processes import family_with, new_marker, pids_with, status_of
from tests.framework.daemon import Daemon
from tests.framework.leaks import sandbox_id_ranges

NONE = "0000000000000000"


@pytest.fixture(scope="module")
def base() -> int:
    """The first host id of sandboxes, from subuid(5)."""
    return sandbox_id_ranges()[0][0]


def ids(pid: int) -> set[str]:
    status = status_of(pid)
    return {*status["Uid"].split(), *status["Gid"].split()}


def pid_one(daemon: Daemon, sandbox: str) -> int:
    """The host's pid of a sandbox's PID 1: the parent of an orphan in it."""
    marker = new_marker()
    daemon.exec(sandbox, f"sleep {marker} & true")
    (pid,) = pids_with(marker)
    return int(status_of(pid)["PPid"])


def test_the_api_is_an_account_without_rights(daemon: Daemon):
    account = pwd.getpwnam("sandboxd")
    for pid in {daemon.api_pid, daemon.pid}:
        status = status_of(pid)
        assert set(status["Uid"].split()) == {str(account.pw_uid)}
        assert set(status["Gid"].split()) == {str(account.pw_gid)}
        assert status["Groups"].split() == []
        assert account.pw_uid != 0
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert status[name] == NONE
        assert status["NoNewPrivs"] == "1"


def test_the_apis_memory_is_closed_to_its_own_account(daemon: Daemon):
    # proc(5): files below /proc/PID of a process that is not dumpable are root's.
    for name in ("mem", "environ", "maps", "fd"):
        assert Path(f"/proc/{daemon.api_pid}/{name}").stat().st_uid == 0


def test_the_launcher_and_its_workers_are_an_id_no_sandbox_can_name(daemon: Daemon, base: int):
    pids = family_with(daemon.refresh_family(), "sandboxd.launcher")
    assert len(pids) >= 3  # launcher, mounter, prober or undertaker
    for pid in pids:
        assert ids(pid) == {str(base + 65_536)}
        assert Path(f"/proc/{pid}/mem").stat().st_uid == 0
        assert os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user")
        assert os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")


def test_the_zygote_and_pid_1_are_that_id_too(daemon: Daemon, sandbox: str, base: int):
    one = pid_one(daemon, sandbox)
    zygote = int(status_of(one)["PPid"])
    for pid in (one, zygote):
        assert ids(pid) == {str(base + 65_536)}
    assert status_of(one)["NSpid"].split()[-1] == "1"
    assert status_of(one)["Seccomp"] == "2"
    assert Path(f"/proc/{one}/mem").stat().st_uid == 0


def test_pid_1_has_namespaces_of_its_own(daemon: Daemon, sandbox: str):
    one = pid_one(daemon, sandbox)
    with daemon.sandbox("busybox") as other:
        two = pid_one(daemon, other)
        for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            spaces = {os.readlink(f"/proc/{pid}/ns/{name}") for pid in (one, two, os.getpid())}
            assert len(spaces) == 3, name


def test_the_image_server_has_an_id_of_its_own_and_no_rights(daemon: Daemon, base: int):
    (pid,) = family_with(daemon.refresh_family(), "squashfuse_ll")
    assert ids(pid) == {str(base + 65_537)}
    status = status_of(pid)
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert status[name] == NONE
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for name in ("mnt", "net", "ipc"):
        assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")


def test_only_servers_hold_fuse_descriptors(daemon: Daemon):
    holders = []
    for pid in daemon.refresh_family():
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if os.path.islink(entry) and os.readlink(entry) == "/dev/fuse":
                holders.append(pid)
    family = daemon.refresh_family()
    servers = family_with(family, "squashfuse_ll") + family_with(family, "sandboxd.views")
    assert sorted(holders) == sorted(servers), "each has one, its own"


def test_root_in_a_sandbox_is_nobody_on_the_host(daemon: Daemon, sandbox: str, base: int):
    marker = new_marker()
    daemon.exec(sandbox, f"sleep {marker} & true")
    daemon.exec(sandbox, f"sleep {marker} & true", user="agent")
    found = {status_of(pid)["Uid"].split()[0]: status_of(pid) for pid in pids_with(marker)}
    assert set(found) == {str(base), str(base + 1000)}
    for status in found.values():
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert found[str(base + 1000)]["CapEff"] == NONE


def test_the_owner_of_the_nodes_user_namespace_is_an_id_without_processes(base: int):
    owner = base + 65_538
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                assert str(owner) not in ids(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue


def test_hostd_and_its_guard_are_the_only_root_of_the_family(daemon: Daemon, sandbox: str):
    roots = [pid for pid in daemon.refresh_family() if "0" in ids(pid)]
    family = daemon.refresh_family()
    known = family_with(family, "sandboxd.host")[:1] + family_with(family, "sandboxd.guard")
    assert sorted(roots) == sorted(known)
    assert len(roots) == 2
