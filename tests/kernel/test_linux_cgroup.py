"""Cgroups of this node's real hierarchies: made, filled, limited, killed, removed."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time

import pytest

from sandboxd.linux import cgroup, cgroup_usage, child, process
from sandboxd.linux.cgroup_limits import limits_for
from tests.framework import times

TIMEOUT_S = times.scaled(10.0)


def soon():
    return time.monotonic() + TIMEOUT_S


@contextlib.contextmanager
def group(controller):
    """A cgroup for a test in the hierarchy of ``controller``; "" is v2."""
    layout = cgroup.layout()
    parent = layout.mount_of(controller) if controller else layout.v2_mount
    path = parent / f"sandboxd-test-{os.getpid()}"
    cgroup.make(path)
    try:
        yield path
    finally:
        cgroup.remove_tree(path, soon())


def test_layout_is_that_of_proc():
    layout = cgroup.layout()
    with open("/proc/cgroups") as file:
        rows = [line.split() for line in file if not line.startswith("#")]
    # /proc/cgroups names the hierarchy of each controller; 0 is v2 (or nowhere).
    assert set(layout.v1) == {name for name, hierarchy, _, _ in rows if hierarchy != "0"}
    for path in layout.own.values():
        assert str(os.getpid()) in (path / "cgroup.procs").read_text().split()
    if layout.v2_mount:
        assert (layout.v2_mount / "cgroup.controllers").exists()


@pytest.mark.needs("cgroup-kill")
class TestV2:
    def test_born_frozen_thawed_and_killed(self):
        with group("") as path:
            inner = path / "inner"
            cgroup.make(inner)
            assert not cgroup.populated(path)
            fd = cgroup.open_directory(inner)
            pid = process.clone3(0, signal.SIGCHLD, fd)
            if pid == 0:
                while True:
                    signal.pause()
            os.close(fd)
            with open(f"/proc/{pid}/cgroup") as file:
                assert f"0::/{path.name}/inner\n" in file.read()
            assert cgroup.processes(inner) == [pid]
            assert cgroup.processes(path) == []
            assert cgroup.populated(path)

            assert cgroup.freeze(path, True, soon())
            assert "frozen 1" in (inner / "cgroup.events").read_text()
            assert cgroup.freeze(path, False, soon())
            assert "frozen 0" in (inner / "cgroup.events").read_text()

            assert not cgroup.wait_empty(path, time.monotonic())
            cgroup.kill(path)
            assert cgroup.wait_empty(path, soon())
            assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
        assert not path.exists()

    def test_kill_ends_a_fork_storm_without_exception(self):
        def storm():
            cgroup.add_process(path, 0)
            os.write(write_fd, b"x")
            deadline = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    if os.fork() == 0:
                        os.setsid()

        limits = limits_for(cgroup.layout(), "pids")
        if limits is None:
            pytest.skip("no pids controller bounds the storm")
        read_fd, write_fd = os.pipe()
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(group("pids"))
            # On v2 the same group is bounded and killed.
            path = bound if limits.version == 2 else stack.enter_context(group(""))
            limits.set_pids(bound, 50)

            def bounded_storm():
                cgroup.add_process(bound, 0)
                storm()

            with child.running(bounded_storm):
                os.close(write_fd)
                assert os.read(read_fd, 1) == b"x"
                cgroup.kill(path)
                assert cgroup.wait_empty(path, soon())
            os.close(read_fd)

    def test_removal_waits_for_the_last_process(self):
        with group("") as path, child.running(signal.pause) as late:
            cgroup.add_process(path, late.pid)
            with pytest.raises(OSError, match="busy") as caught:
                cgroup.remove_tree(path, time.monotonic())
            assert caught.value.errno == errno.EBUSY
            cgroup.kill(path)
            cgroup.remove_tree(path, soon())
            assert not path.exists()

    def test_writes_report_at_the_write(self):
        with group("") as path, pytest.raises(OSError, match=r"cgroup\.freeze") as caught:
            cgroup.write(path / "cgroup.freeze", "nonsense")
        assert caught.value.errno == errno.EINVAL


def test_a_process_that_does_not_exist_cannot_be_moved():
    layout = cgroup.layout()
    controller = "pids" if layout.mount_of("pids") else ""
    with group(controller) as path, pytest.raises(ProcessLookupError):
        cgroup.add_process(path, 4_194_305)  # above the highest possible pid_max


@pytest.mark.needs("cgroup-limits")
class TestLimits:
    """What was written is what the kernel then has; that limits hold is in test_features."""

    def test_memory_up_and_down(self):
        limits = limits_for(cgroup.layout(), "memory")
        with group("memory") as path:
            names = {
                1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
                2: ("memory.max", "memory.swap.max"),
            }
            memory, swap = (path / name for name in names[limits.version])
            for mib in (64, 128, 32, 512):
                limits.set_memory(path, mib << 20, 1 << 20)
                assert int(memory.read_text()) == mib << 20
                if swap.exists():
                    extra = mib if limits.version == 1 else 0
                    assert int(swap.read_text()) == extra + 1 << 20
            assert limits.memory_bytes(path) == 0
            assert limits.oom_kills(path) == 0

    def test_usage_of_all_groups_below_one(self):
        def hold():
            cgroup.add_process(path / "one", 0)
            page = bytearray(8 << 20)
            os.write(write_fd, b"x")
            signal.pause()
            return len(page)

        read_fd, write_fd = os.pipe()
        with group("memory") as path:
            for name in ("one", "two"):
                cgroup.make(path / name)
            if cgroup.layout().version_of("memory") == 2:
                cgroup.enable_controllers(path, frozenset({"memory"}))
            with child.running(hold):
                assert os.read(read_fd, 1) == b"x"
                one, two = cgroup_usage.usage_below(cgroup.layout(), path.name)
            assert (one.name, one.processes, two.name, two.processes) == ("one", 1, "two", 0)
            assert one.memory_bytes >= 8 << 20
            assert two.memory_bytes == 0
            assert cgroup_usage.usage_below(cgroup.layout(), "no-such-group") == []
        os.close(read_fd)
        os.close(write_fd)

    def test_pids_are_counted_and_refusals_too(self):
        limits = limits_for(cgroup.layout(), "pids")

        def fork_twice():
            cgroup.add_process(path, 0)
            with child.running(signal.pause):
                seen = limits.pids(path)
                try:
                    if os.fork() == 0:
                        os._exit(0)
                except BlockingIOError:
                    return [seen, limits.pids_refused(path)]
            return None

        with group("pids") as path:
            limits.set_pids(path, 2)
            assert child.run(fork_twice, TIMEOUT_S) == [2, 1]

    def test_cpu_time_is_counted(self):
        layout = cgroup.layout()
        limits = limits_for(layout, "cpu")

        def burn():
            cgroup.add_process(path, 0)
            before = time.process_time()
            while time.process_time() < before + 0.02:
                pass

        controller = "cpuacct" if limits.version == 1 else "cpu"
        with group(controller) as path:
            child.run(burn, TIMEOUT_S)
            assert limits.cpu_usec(path) >= 20_000
