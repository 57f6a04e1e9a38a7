"""Signals and waiting by pidfd: a number that was given to another process is never hit."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import time
from contextlib import suppress
from typing import Final

from sandboxd.linux import _libc

P_PIDFD: Final = os.P_PIDFD

NR_PIDFD_GETFD: Final = 438  # <asm/unistd.h>

_pidfd_getfd = _libc.syscall(NR_PIDFD_GETFD, ctypes.c_int, ctypes.c_int, ctypes.c_uint)


def pidfd_open(pid: int) -> int:
    """pidfd_open(2): a close-on-exec descriptor of ``pid``."""
    return os.pidfd_open(pid)


def open_living(pid: int) -> int | None:
    """The same; None where no process has that number (any more).

    That is ESRCH, and EINVAL (Linux 6.1) where the number is still that of a process group or a
    session whose leader has been waited for.
    """
    try:
        return pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """pidfd_send_signal(2). ESRCH (ProcessLookupError) once the process has been waited for."""
    signal.pidfd_send_signal(pidfd, number)


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """pidfd_getfd(2): our own copy (close-on-exec) of a descriptor of another process."""
    return _pidfd_getfd(f"pidfd_getfd {fd}", pidfd, fd, 0)


def wait_ended(pidfd: int, timeout_s: float | None) -> bool:
    """Wait until the process has ended (it may be a zombie still); False when the time is up."""
    return bool(wait_any_ended([pidfd], timeout_s))


def kill_within(pidfd: int, timeout_s: float) -> bool:
    """SIGKILL, and whether the process has ended by then: a file system may hold it up."""
    with suppress(ProcessLookupError):
        pidfd_send_signal(pidfd, signal.SIGKILL)
    return wait_ended(pidfd, timeout_s)


def wait_any_ended(pidfds: list[int], timeout_s: float | None) -> list[int]:
    """Those of ``pidfds`` whose process has ended, waiting for the first; empty on time-out."""
    poller = select.poll()
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if ended := [fd for fd, _ in poller.poll(left_ms)]:
            return ended
        if deadline is not None and time.monotonic() >= deadline:
            return []


def reap(pidfd: int, timeout_s: float | None) -> os.waitid_result | None:
    """Wait for a child and collect it; None when it still runs as the time is up."""
    if not wait_ended(pidfd, timeout_s):
        return None
    return os.waitid(P_PIDFD, pidfd, os.WEXITED)
