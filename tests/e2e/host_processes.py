"""Processes as the host sees them: the word on what lives that no daemon can colour.

For: tests that must know whether something of a sandbox still runs. A test gives its program a
marker, an argument that occurs nowhere else, and looks for it in every command line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import time
from collections.abc import Callable
from pathlib import Path

from tests.framework import times

WAIT_S = times.scaled(60.0)


def new_marker() -> str:
    """A number of seconds (what sleep(1) takes) that no other process on this machine has."""
    return str(10**9 + secrets.randbelow(10**9))


def pids_with(marker: str) -> list[int]:
    """Every process of the host that has `marker` in its command line; a zombie has none."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if marker.encode() in Path(entry.path, "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """For states of foreign processes, which announce themselves to nobody."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def wait_for_marker(marker: str, count: int = 1) -> None:
    wait_for(lambda: len(pids_with(marker)) >= count, f"{count} processes with {marker}")


def status_of(pid: int) -> dict[str, str]:
    """proc_pid_status(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def family_with(pids: set[int], text: str) -> list[int]:
    """Those of `pids` whose command line holds `text`, the eldest first: numbers begin anew, and a
    PID 1 has its zygote's command line."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if text in command_line(pid):
                found.append((begun_at(pid), pid))
    return [pid for _, pid in sorted(found)]


def begun_at(pid: int) -> int:
    """Ticks since boot: proc_pid_stat(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def wait_for_end(pid: int, timeout_s: float = WAIT_S) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        # EINVAL, Linux 6.1: ended, but its number is still that of a session or a group.
        if error.errno not in (errno.ESRCH, errno.EINVAL):
            raise
        return
    try:
        assert select.select([pidfd], [], [], timeout_s)[0], f"pid {pid} still lives"
    finally:
        os.close(pidfd)
