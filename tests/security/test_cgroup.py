"""Cgroups: not to be seen, written or left."""

from __future__ import annotations

import pytest

from tests.security.probing import Host, Inside


def test_own_cgroup_shows_no_path_of_the_host(inside: Inside) -> None:
    """Below the sandbox's own root, nothing but the command's own group."""
    for line in inside.shell("cat /proc/self/cgroup").splitlines():
        path = line.split(":", 2)[2]
        assert path == "/" or path.removeprefix("/e").isdigit(), line


def test_cgroup_of_pid1_shows_no_path_of_the_host(inside: Inside) -> None:
    for line in inside.shell("cat /proc/1/cgroup").splitlines():
        assert line.split(":", 2)[2] == "/", line


def test_no_cgroup_file_system_is_mounted(inside: Inside) -> None:
    assert "cgroup" not in inside.shell("cat /proc/self/mountinfo")
    assert inside.ask("list:/sys/fs/cgroup") in ("ok 0", "ENOENT")


@pytest.mark.parametrize("name", ["cgroup.procs", "release_agent", "memory/memory.limit_in_bytes"])
def test_cgroup_file_is_not_there(name: str, inside: Inside) -> None:
    assert inside.ask(f"open_w:/sys/fs/cgroup/{name}") in ("ENOENT", "EROFS")


@pytest.mark.parametrize("name", ["cgroup", "cgroup2"])
def test_cgroup_cannot_be_mounted(name: str, inside: Inside) -> None:
    answer = inside.run(["/bin/mount", "-t", name, "none", "/tmp"])
    assert answer["exit_code"] != 0
    assert "not permitted" in answer["stderr"] or "denied" in answer["stderr"]


def test_cgroup_namespace_cannot_be_left(inside: Inside, host: Host) -> None:
    assert inside.ask("unshare:2000000") == "EPERM"
    assert host.ask("unshare:2000000") == "ok 0"


def test_cgroup_directory_cannot_be_reached_through_a_descriptor(inside: Inside) -> None:
    """A command has 0, 1 and 2, and nothing of PID 1's."""
    told = inside.shell("for fd in /proc/self/fd/*; do readlink $fd; done")
    assert "cgroup" not in told
    assert not [line for line in told.splitlines() if line.startswith("/") and line != "/dev/null"]
