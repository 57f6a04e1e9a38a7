"""A process's own attributes: prctl(2) by python-prctl, resource limits, and clone3(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

import prctl

from sandboxd.linux import _libc

CLONE_PIDFD: Final = 0x0000_1000
CLONE_INTO_CGROUP: Final = 0x2_0000_0000

RLIM_INFINITY: Final = resource.RLIM_INFINITY

SERVING_NICE: Final = 5
"""By how much what serves sandboxes is before them: three times the weight of an ordinary process
(``sched_prio_to_weight`` in kernel/sched/core.c), so that it need not wait for a slice to end."""


class CloneArgs(ctypes.Structure):
    """``struct clone_args`` of clone3(2), CLONE_ARGS_SIZE_VER2 (with ``cgroup``, Linux 5.7)."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    )


NR_CLONE3: Final = 435  # <asm/unistd.h>

_clone3 = _libc.syscall(NR_CLONE3, ctypes.POINTER(CloneArgs), ctypes.c_size_t)


def clone3(flags: int, exit_signal: int, cgroup_fd: int | None = None) -> int:
    """clone3(2) as a fork: 0 in the child. ``cgroup_fd`` places the child in that cgroup (v2).

    The C library knows nothing of the child: no fork handlers have run in it, its locks are as they
    were. It may do system calls and ``os._exit``.
    """
    args = CloneArgs(flags=flags, exit_signal=exit_signal)
    if cgroup_fd is not None:
        args.flags |= CLONE_INTO_CGROUP
        args.cgroup = cgroup_fd
    return _clone3(f"clone3 {args.flags:#x}", ctypes.byref(args), ctypes.sizeof(args))


def set_no_new_privs() -> None:
    """PR_SET_NO_NEW_PRIVS: no exec of this process or its children gains anything. No way back."""
    prctl.set_no_new_privs(1)


def set_dumpable(dumpable: bool) -> None:
    """PR_SET_DUMPABLE. Not dumpable: no ptrace, and /proc/PID belongs to root."""
    prctl.set_dumpable(int(dumpable))


def set_child_subreaper(subreaper: bool) -> None:
    """PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process."""
    prctl.set_child_subreaper(int(subreaper))


def set_parent_death_signal(number: int, parent_pid: int | None = None) -> None:
    """PR_SET_PDEATHSIG: be sent ``number`` when the *thread* that made this process ends.

    A change of credentials clears it. With ``parent_pid``, ESRCH if that parent was gone before the
    call and so will never send it. A parent in an outer pid namespace (0) cannot be told from its
    successor.
    """
    prctl.set_pdeathsig(number)
    if parent_pid is not None and os.getppid() not in (0, parent_pid):
        raise _libc.oserror(errno.ESRCH, f"parent {parent_pid} ended before PR_SET_PDEATHSIG")


def raise_limit(which: int, wanted: int) -> int:
    """Raise a soft limit to ``wanted``, or to the hard limit where that is lower; the new soft one.

    The hard limit is raised too where the kernel allows it (CAP_SYS_RESOURCE).
    """
    soft, hard = resource.getrlimit(which)
    if hard != RLIM_INFINITY and (wanted == RLIM_INFINITY or wanted > hard):
        try:
            resource.setrlimit(which, (wanted, wanted))
        except (ValueError, PermissionError):  # ValueError is Python's name for EPERM here
            wanted = hard
        else:
            return wanted
    if soft != RLIM_INFINITY and (wanted == RLIM_INFINITY or wanted > soft):
        resource.setrlimit(which, (wanted, hard))
        return wanted
    return soft


def raise_priority(pid: int = 0) -> None:
    """Let a process (0: this one), and the threads it starts, have a CPU before others that want
    it too. Left where the kernel does not allow it (CAP_SYS_NICE)."""
    with suppress(PermissionError, ProcessLookupError):
        now = os.getpriority(os.PRIO_PROCESS, pid)
        os.setpriority(os.PRIO_PROCESS, pid, max(-20, now - SERVING_NICE))


def ordinary_priority(pid: int) -> None:
    """Of a process that was started by one with a raised priority, and is not to have it."""
    with suppress(ProcessLookupError, PermissionError):
        now = os.getpriority(os.PRIO_PROCESS, pid)
        os.setpriority(os.PRIO_PROCESS, pid, max(0, now))


def lower_oom_score(wanted: int) -> int:
    """Have the OOM killer spare this process and what it starts; the score that it has then.

    Never raised, and left where the kernel does not allow it (CAP_SYS_RESOURCE): a service manager
    may have set a lower one.
    """
    file = Path("/proc/self/oom_score_adj")
    now = int(file.read_text(encoding="ascii"))
    if wanted < now:
        with suppress(PermissionError):
            file.write_text(str(wanted), encoding="ascii")
            return wanted
    return now


def raise_oom_score(wanted: int) -> None:
    """Its own oom_score_adj. Left where it is higher and may not be lowered: that of an ordinary
    user's processes, which were given it by somebody with CAP_SYS_RESOURCE."""
    file = Path("/proc/self/oom_score_adj")
    try:
        file.write_text(str(wanted), encoding="ascii")
    except PermissionError:
        if int(file.read_text(encoding="ascii")) < wanted:
            raise
