"""Namespaces, pidfds, capabilities and the children that probe, checked through /proc."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import prctl
import pytest

from sandboxd.linux import capabilities, child, id_ranges, namespaces, pidfd, process, procfs
from sandboxd.linux.child import ChildError
from sandboxd.linux.id_ranges import IdRange
from tests.framework import times

TIMEOUT_S = times.scaled(10.0)
IDS = IdRange(2_000_000_000, 65_538)
ALL = {
    "cgroup": namespaces.CLONE_NEWCGROUP,
    "ipc": namespaces.CLONE_NEWIPC,
    "mnt": namespaces.CLONE_NEWNS,
    "net": namespaces.CLONE_NEWNET,
    "user": namespaces.CLONE_NEWUSER,
    "uts": namespaces.CLONE_NEWUTS,
}


def map_many(pid):
    id_ranges.map_ids(pid, IDS, IDS)


@pytest.mark.needs("userns", "namespaces")
def test_unshare_makes_just_the_namespaces_asked_for():
    own = {name: namespaces.namespace_id("self", name) for name in ALL}

    def look():
        return {name: namespaces.namespace_id("self", name) for name in ALL}

    some = ALL["user"] | ALL["net"]
    inside = child.run(look, TIMEOUT_S, some, map_many)
    assert {name for name in ALL if inside[name] != own[name]} == {"user", "net"}
    inside = child.run(look, TIMEOUT_S, sum(ALL.values()), map_many)
    assert all(inside[name] != own[name] for name in ALL)


@pytest.mark.needs("userns", "namespaces")
def test_setns_enters_by_namespace_and_by_pidfd():
    with child.running(signal.pause, ALL["user"] | ALL["uts"], map_many) as other:
        target = namespaces.namespace_id(other.pid, "uts")
        assert target != namespaces.namespace_id("self", "uts")

        def by_namespace():
            namespaces.setns(namespaces.open_namespace(other.pid, "user"), ALL["user"])
            namespaces.setns(namespaces.open_namespace(other.pid, "uts"), ALL["uts"])
            return namespaces.namespace_id("self", "uts")

        def by_pidfd():
            namespaces.setns(other.pidfd, ALL["user"] | ALL["uts"])
            return namespaces.namespace_id("self", "uts")

        assert child.run(by_namespace, TIMEOUT_S) == target
        assert child.run(by_pidfd, TIMEOUT_S) == target


@pytest.mark.needs("userns")
def test_id_maps_are_as_written():
    def map_two_ranges(pid):
        ranges = [(0, IDS.first, 10), (1000, IDS.first + 10, 1)]
        namespaces.write_id_map(pid, ranges, [(0, IDS.first, 5)])

    def look():
        with open("/proc/self/uid_map") as uids, open("/proc/self/gid_map") as gids:
            return [[line.split() for line in file] for file in (uids, gids)]

    uid_map, gid_map = child.run(look, TIMEOUT_S, ALL["user"], map_two_ranges)
    assert uid_map == [["0", str(IDS.first), "10"], ["1000", str(IDS.first + 10), "1"]]
    assert gid_map == [["0", str(IDS.first), "5"]]


@pytest.mark.needs("userns")
def test_a_map_of_own_ids_only():
    def look():
        with open("/proc/self/setgroups") as file:
            return [file.read().strip(), procfs.ids_of().uids[0]]

    expected = "allow" if os.geteuid() == 0 else "deny"
    assert child.run(look, TIMEOUT_S, ALL["user"], id_ranges.map_self_only) == [expected, 0]


@pytest.mark.needs("userns")
def test_a_map_is_written_once():
    def map_twice(pid):
        map_many(pid)
        with pytest.raises(PermissionError) as caught:
            namespaces.write_id_map(pid, [(0, 0, 1)], [(0, 0, 1)])
        assert f"/proc/{pid}/uid_map" in str(caught.value)

    child.run(lambda: None, TIMEOUT_S, ALL["user"], map_twice)


def test_pidfd_signals_and_waits():
    with child.running(signal.pause) as paused:
        assert not pidfd.wait_ended(paused.pidfd, 0)
        pidfd.pidfd_send_signal(paused.pidfd, signal.SIGTERM)
        ended = pidfd.reap(paused.pidfd, TIMEOUT_S)
        assert ended is not None
        assert (ended.si_code, ended.si_status) == (os.CLD_KILLED, signal.SIGTERM)
        with pytest.raises(ProcessLookupError):
            pidfd.pidfd_send_signal(paused.pidfd, 0)


def test_waiting_for_the_first_of_several():
    with child.running(signal.pause) as slow, child.running(lambda: None) as quick:
        pidfds = [slow.pidfd, quick.pidfd]
        assert pidfd.wait_any_ended(pidfds, TIMEOUT_S) == [quick.pidfd]
        assert pidfd.wait_any_ended([slow.pidfd], 0.001) == []


def test_pidfd_getfd_takes_the_very_same_file():
    read_fd, write_fd = os.pipe()
    with child.running(signal.pause) as holder:
        taken = pidfd.pidfd_getfd(holder.pidfd, write_fd)
    os.close(write_fd)
    os.write(taken, b"x")
    assert os.read(read_fd, 1) == b"x"
    assert not os.get_inheritable(taken)
    os.close(taken)
    os.close(read_fd)


def test_clone3_is_a_fork():
    pid = process.clone3(0, signal.SIGCHLD)
    if pid == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_clone3_refuses_an_exit_signal_out_of_range():
    with pytest.raises(OSError, match="clone3") as caught:
        process.clone3(0, 1000)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.needs("userns")
def test_bounding_set_keeps_just_what_is_named():
    keep = [capabilities.CAP_CHOWN, capabilities.CAP_KILL, 40]

    def work():
        capabilities.drop_bounding(keep)
        return procfs.capabilities_of()["CapBnd"]

    assert child.run(work, TIMEOUT_S, ALL["user"], map_many) == 1 << 40 | 1 << 5 | 1


@pytest.mark.needs("userns")
def test_capset_and_what_is_gone_stays_gone():
    def work():
        everything = capabilities.capget().permitted
        bits = capabilities.mask([capabilities.CAP_SETUID, 40])
        capabilities.capset(0, bits, bits)
        found = procfs.capabilities_of()
        with pytest.raises(PermissionError):
            capabilities.capset(0, everything, 0)
        return [found["CapEff"], found["CapPrm"], found["CapInh"]]

    bits = 1 << 40 | 1 << 7
    assert child.run(work, TIMEOUT_S, ALL["user"], map_many) == [0, bits, bits]


@pytest.mark.needs("userns")
def test_no_setuid_fixup_keeps_capabilities_over_a_change_of_ids():
    def work(bits):
        capabilities.set_securebits(bits)
        assert capabilities.get_securebits() == bits
        os.setresuid(1000, 1000, 1000)
        return procfs.capabilities_of()["CapEff"] != 0

    def kept(bits):
        return child.run(lambda: work(bits), TIMEOUT_S, ALL["user"], map_many)

    assert kept(capabilities.SECBIT_NO_SETUID_FIXUP)
    assert not kept(0)


def test_attributes_of_a_process():
    def work():
        process.set_no_new_privs()
        process.set_dumpable(False)
        process.set_child_subreaper(True)
        process.set_parent_death_signal(signal.SIGUSR1)
        return [
            procfs.status()["NoNewPrivs"],
            prctl.get_dumpable(),
            prctl.get_child_subreaper(),
            prctl.get_pdeathsig(),
        ]

    assert child.run(work, TIMEOUT_S) == ["1", 0, 1, signal.SIGUSR1]


def test_parent_death_signal_ends_a_grandchild():
    read_fd, write_fd = os.pipe()

    def parent():
        pid = os.fork()
        if pid == 0:
            process.set_parent_death_signal(signal.SIGKILL, os.getppid())
            os.write(write_fd, b"ready")
            signal.pause()
        os.close(write_fd)
        assert os.read(read_fd, 5) == b"ready"

    child.run(parent, TIMEOUT_S)
    os.close(write_fd)
    assert os.read(read_fd, 1) == b"", "the grandchild holds the pipe's other end while it lives"
    os.close(read_fd)


def test_parent_death_signal_of_a_parent_that_is_gone():
    with pytest.raises(ProcessLookupError):
        child.run(lambda: process.set_parent_death_signal(signal.SIGKILL, 1), TIMEOUT_S)


def test_children_are_listed():
    with child.running(signal.pause) as other:
        assert other.pid in procfs.children()
        assert procfs.stat(other.pid).parent_pid == os.getpid()
    with pytest.raises(FileNotFoundError):
        procfs.stat(other.pid)


def test_raise_limit():
    import resource

    def work():
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
        within = process.raise_limit(resource.RLIMIT_NOFILE, 150)
        unchanged = process.raise_limit(resource.RLIMIT_NOFILE, 120)
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return [within, unchanged, now]

    assert child.run(work, TIMEOUT_S) == [150, 150, 150]


@pytest.mark.needs("userns")
def test_raise_limit_stops_at_a_hard_limit_that_is_not_ours_to_raise():
    import resource

    def work():
        # Root of a user namespace has no CAP_SYS_RESOURCE in the initial one.
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
        return process.raise_limit(resource.RLIMIT_NOFILE, 4096)

    assert child.run(work, TIMEOUT_S, ALL["user"], map_many) == 200


def children() -> set[str]:
    """Those of this process; zombies too. A test before may have left one that lives for good."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


class TestChild:
    def test_answers_and_errors_come_across(self):
        assert child.run(lambda: {"a": [1, None]}, TIMEOUT_S) == {"a": [1, None]}
        with pytest.raises(FileNotFoundError) as caught:
            child.run(lambda: os.open("/no/such", os.O_RDONLY), TIMEOUT_S)
        assert caught.value.filename == "/no/such"
        with pytest.raises(ChildError, match="ZeroDivisionError"):
            child.run(lambda: 1 // 0, TIMEOUT_S)

    def test_a_killed_child_says_how(self):
        with pytest.raises(ChildError, match="signal 9"):
            child.run(lambda: os.kill(os.getpid(), signal.SIGKILL), TIMEOUT_S)

    def test_a_late_child_is_killed_with_its_own_children(self):
        read_fd, write_fd = os.pipe()

        def work():
            with child.running(signal.pause):
                os.write(write_fd, b"ready")
                signal.pause()

        started = time.monotonic()
        with child.running(work) as late:
            os.close(write_fd)
            assert os.read(read_fd, 5) == b"ready"
            with pytest.raises(TimeoutError):
                late.result(0.01)
        assert os.read(read_fd, 1) == b"", "someone still holds the pipe"
        os.close(read_fd)
        assert time.monotonic() - started < TIMEOUT_S

    def test_system_exit_in_the_child_stays_there(self):
        with pytest.raises(ChildError, match="no answer"):
            child.run(lambda: (_ for _ in ()).throw(SystemExit(3)), TIMEOUT_S)

    @pytest.mark.needs("userns")
    def test_a_failed_preparation_is_raised_and_ends_the_child(self):
        def prepare(pid):
            raise RuntimeError("cannot map")

        before = children()
        with pytest.raises(RuntimeError, match="cannot map"):
            child.run(lambda: None, TIMEOUT_S, ALL["user"], prepare)
        assert children() <= before

    def test_a_failed_unshare_is_raised(self):
        with pytest.raises(OSError, match="unshare") as caught:
            child.run(lambda: None, TIMEOUT_S, 1)
        assert caught.value.errno == errno.EINVAL


def test_a_number_without_a_process_is_nobody():
    """Not even where it lives on as that of a group and a session: Linux 6.1 has an error of its
    own for that."""
    ours, theirs = os.pipe()
    leader = os.fork()
    if leader == 0:
        os.setsid()
        member = os.fork()
        if member:
            os.write(theirs, str(member).encode())
            os._exit(0)
        signal.pause()
        os._exit(0)
    try:
        member = int(os.read(ours, 16))
        fd = pidfd.open_living(leader)
        assert fd is not None  # a zombie at least
        os.close(fd)
        os.waitpid(leader, 0)
        assert os.getpgid(member) == os.getsid(member) == leader
        assert pidfd.open_living(leader) is None
        fd = pidfd.open_living(member)
        assert fd is not None
        os.close(fd)
    finally:
        os.killpg(leader, signal.SIGKILL)
        os.close(ours)
        os.close(theirs)
