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


def test_only_views_are_to_be_seen_of_cgroups(inside: Inside) -> None:
    """One cgroup2 is mounted, of its own namespace and read-only, as the JVM looks for one; under a
    mask, and that under the views: what is reached is neither of a cgroup."""
    lines = inside.shell("cat /proc/self/mountinfo").splitlines()
    found = [line.split() for line in lines if line.split()[4].startswith("/sys/fs/cgroup")]
    # They are told in the order in which they were made, and lie on one another by their parents.
    on = {words[1]: words for words in found}
    (at,) = on.keys() - {words[0] for words in found}
    stack = []
    while at in on:
        stack.append(on[at])
        at = on[at][0]
    assert len(stack) == len(found)
    kinds = [words[words.index("-") + 1] for words in stack]
    assert kinds == ["cgroup2", "tmpfs", "fuse.views"]
    assert all(words[4] == "/sys/fs/cgroup" for words in stack)
    assert stack[0][3] == "/"
    assert all("ro" in words[5].split(",") for words in stack)
    assert not [line for line in lines if " - cgroup " in line]
    assert inside.shell("stat -f -c %t /sys/fs/cgroup").strip() == "65735546"  # FUSE_SUPER_MAGIC


@pytest.mark.parametrize("name", ["cgroup.procs", "cgroup.kill", "cgroup.freeze", "cpu.pressure"])
def test_cgroup_file_is_not_there(name: str, inside: Inside) -> None:
    for directory in ("", "e1/", "memory/"):
        assert inside.ask(f"open_w:/sys/fs/cgroup/{directory}{name}") in ("ENOENT", "EROFS")
        assert inside.ask(f"open_r:/sys/fs/cgroup/{directory}{name}") == "ENOENT"


@pytest.mark.parametrize("name", ["memory.max", "cpu.max", "memory/memory.limit_in_bytes"])
def test_cgroup_file_cannot_be_written(name: str, inside: Inside) -> None:
    assert inside.ask(f"open_w:/sys/fs/cgroup/{name}") == "EROFS"
    assert inside.ask(f"open_r:/sys/fs/cgroup/{name}").startswith("ok")


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
