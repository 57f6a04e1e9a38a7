"""PID 1, the launcher and the daemon: out of reach of everything in a sandbox.

The control is the same try at a process of one's own, by the same user in the same sandbox.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.framework.daemon import Daemon
from tests.security.probing import Host, Inside, alive

DENIED = {"EPERM", "EACCES"}

CALLS = """
prlimit_get prlimit_set affinity renice sched_idle sched_setattr ioprio ptrace_attach ptrace_seize
vm_readv vm_writev pidfd_getfd kcmp robust_list
"""
READS = """
mem maps smaps smaps_rollup numa_maps environ auxv syscall stack io pagemap personality mountstats
timerslack_ns timers patch_state
"""
FREE_TO_READ = frozenset({"timers"})
"""Where the kernel has it, anyone may open it; PID 1 makes no POSIX timer, so it is empty."""
WRITES = """
mem oom_score_adj oom_adj clear_refs coredump_filter timens_offsets comm autogroup sched uid_map
gid_map projid_map setgroups make-it-fail
"""


def limits(pid: int) -> str:
    return Path(f"/proc/{pid}/limits").read_text()


def settings(pid: int) -> tuple[object, ...]:
    """What could be turned on a process from outside."""
    return (
        limits(pid),
        Path(f"/proc/{pid}/oom_score_adj").read_text(),
        os.sched_getaffinity(pid),
        os.sched_getscheduler(pid),
        os.getpriority(os.PRIO_PROCESS, pid),
    )


@pytest.mark.parametrize("call", CALLS.split())
def test_pid1_is_out_of_reach_of(call: str, inside: Inside) -> None:
    assert inside.ask(f"{call}:1") in DENIED
    assert inside.ask(f"{call}:child").startswith("ok")


@pytest.mark.parametrize("call", ["process_madvise", "process_mrelease", "setpgid"])
def test_pid1_is_not_changed_by(call: str, inside: Inside) -> None:
    assert inside.ask(f"{call}:1") in DENIED | {"EINVAL", "ESRCH"}


def nothing(name: str) -> frozenset[str]:
    """The answers to a read of that file of PID 1 that tell nothing."""
    return frozenset(DENIED) | {"ENOENT"} | ({"ok 0"} if name in FREE_TO_READ else frozenset())


@pytest.mark.parametrize("name", READS.split())
def test_pid1_tells_nothing_by(name: str, inside: Inside) -> None:
    assert inside.ask(f"proc_read:1,{name}") in nothing(name)


def test_control_own_process_tells(inside: Inside) -> None:
    for name in ("maps", "environ", "auxv", "io", "pagemap"):
        assert inside.ask(f"proc_read:child,{name}").startswith("ok"), name


@pytest.mark.parametrize("name", WRITES.split())
def test_pid1_takes_nothing_by(name: str, inside: Inside) -> None:
    assert inside.ask(f"proc_open_w:1,{name}") in DENIED | {"ENOENT"}


def test_control_own_process_takes(inside: Inside) -> None:
    for name in ("mem", "oom_score_adj", "clear_refs", "coredump_filter", "comm"):
        assert inside.ask(f"proc_open_w:child,{name}").startswith("ok"), name


def test_pid1_timer_slack_cannot_be_written(inside: Inside) -> None:
    """Anyone may open it; the check is made at the write."""
    assert inside.ask("proc_rewrite:1,timerslack_ns") in DENIED
    assert inside.ask("proc_rewrite:child,oom_score_adj").startswith("ok")


@pytest.mark.parametrize("name", ["fd", "fdinfo", "map_files", "root", "cwd", "ns", "task/1/fd"])
def test_pid1_directory_is_closed(name: str, inside: Inside) -> None:
    assert inside.ask(f"proc_list:1,{name}") in DENIED


@pytest.mark.parametrize("name", ["exe", "root", "cwd", "ns/mnt", "ns/user", "ns/pid", "fd/3"])
def test_pid1_link_is_closed(name: str, inside: Inside) -> None:
    assert inside.ask(f"proc_readlink:1,{name}") in DENIED
    assert inside.ask(f"proc_open_r:1,{name}") in DENIED


def test_control_own_links_are_open(inside: Inside) -> None:
    for name in ("exe", "root", "cwd", "ns/mnt"):
        assert inside.ask(f"proc_readlink:child,{name}").startswith("ok"), name


@pytest.mark.parametrize(
    "number", [1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 24, 25, 31, 34, 64]
)
def test_signal_does_nothing_to_pid1(number: int, inside: Inside) -> None:
    assert inside.ask(f"kill:1,{number}") in {"ok 0", "EPERM"}
    alive(inside.daemon, inside.sandbox)


def test_control_signals_stop_and_kill_an_own_process(inside: Inside) -> None:
    for number in (9, 15, 19, 11):
        assert inside.ask(f"kill_child:{number}") == "ok 0"


def test_signal_storm_does_nothing_to_pid1(as_root: Inside) -> None:
    assert as_root.ask("signal_storm:50000") == "ok 50000"
    alive(as_root.daemon, as_root.sandbox)


@pytest.mark.parametrize("user", ["root", "agent"])
def test_killing_everything_leaves_the_sandbox_usable(
    user: str, daemon: Daemon, hostile: str
) -> None:
    answer = daemon.exec(hostile, "sleep 60 & kill -9 -1; echo missed", user=user)
    assert answer["signal"] == 9 or answer["stdout"] == "missed\n"
    alive(daemon, hostile)
    assert daemon.exec(hostile, ["/bin/ps"])["exit_code"] == 0


def test_pid1_is_as_it_was(as_root: Inside) -> None:
    """All of that, and nothing of it has changed how PID 1 runs."""
    pid = host_pid_of_pid1(as_root)
    before = settings(pid)
    for call in CALLS.split():
        as_root.ask(f"{call}:1")
    for word in ("proc_rewrite:1,timerslack_ns", "proc_rewrite:1,oom_score_adj"):
        as_root.ask(word)
    assert settings(pid) == before


def host_pid_of_pid1(inside: Inside) -> int:
    """By its namespace: the sandbox's own processes have the same, and an NSpid of more than 1."""
    mine = set()
    for pid in inside.daemon.refresh_family():
        try:
            told = Path(f"/proc/{pid}/status").read_text()
            hostname = Path(f"/proc/{pid}/root/probes/probe").exists()
        except OSError:
            continue
        numbers = next(line for line in told.splitlines() if line.startswith("NSpid")).split()
        if hostname and numbers[-1] == "1" and len(numbers) > 2:
            mine.add(pid)
    assert mine
    return mine.pop()


def test_pid1_is_not_the_favourite_of_the_oom_killer(as_root: Inside) -> None:
    pid = host_pid_of_pid1(as_root)
    own = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
    assert 0 <= own < int(as_root.shell("cat /proc/self/oom_score_adj"))


def test_core_dump_of_pid1s_children_is_held_off(as_root: Inside) -> None:
    """Before it becomes a command, a child can be signalled by the sandbox's root: SIGQUIT would
    start the host's core-dump helper, where the limit is not inherited from PID 1."""
    line = next(
        line for line in as_root.shell("cat /proc/1/limits").splitlines() if "core file" in line
    )
    assert line.split()[4:6] == ["1", "1"]


# --- the launcher, the daemon and their like ---------------------------------------------------


def family(daemon: Daemon) -> list[int]:
    """Processes of the daemon that are no sandbox's."""
    own = os.readlink("/proc/self/ns/pid")
    found = []
    for pid in sorted(daemon.refresh_family()):
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") == own:
                found.append(pid)
        except OSError:
            continue
    return found


def test_no_process_outside_can_be_seen(inside: Inside) -> None:
    seen = {int(name) for name in inside.shell("ls /proc").split() if name.isdigit()}
    assert not seen & set(family(inside.daemon))
    assert min(seen) == 1
    assert len(seen) < 10


def test_no_process_outside_can_be_signalled(inside: Inside, host: Host) -> None:
    pids = family(inside.daemon)
    assert len(pids) > 3
    for pid in pids:
        assert inside.ask(f"kill:{pid},0") == "ESRCH"
    assert host.ask(f"kill:{pids[0]},0") == "ok 0"


@pytest.mark.parametrize("call", ["prlimit_get", "affinity", "ptrace_seize", "vm_readv", "renice"])
def test_no_process_outside_can_be_named(call: str, inside: Inside) -> None:
    for pid in family(inside.daemon)[:6]:
        assert inside.ask(f"{call}:{pid}") == "ESRCH"


def test_nothing_that_serves_sandboxes_is_root_or_a_sandboxs_id(
    daemon: Daemon, standing: str
) -> None:
    """hostd alone is root; launcher and zygote have an id of their own, the API another."""
    roots = [pid for pid in family(daemon) if os.stat(f"/proc/{pid}").st_uid == 0]
    uids = {pid: _uid(pid) for pid in family(daemon)}
    assert [pid for pid, uid in uids.items() if uid == 0] == roots[:1] or len(roots) <= 2
    base = int(_subuid())
    assert not [pid for pid, uid in uids.items() if base <= uid < base + 65536]
    assert _uid(daemon.api_pid) not in (0, *range(base, base + 65536))


def _uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("Uid:")).split()[2])


def _subuid() -> str:
    lines = Path("/etc/subuid").read_text().splitlines()
    return next(line for line in lines if line.startswith("sandboxd:")).split(":")[1]
