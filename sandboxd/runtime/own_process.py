"""What the daemon's own process uses, from /proc/self: proc_pid_statm(5), proc_pid_stat(5)."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


def memory_bytes() -> int:
    """Resident."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_fds() -> int:
    # One of them is the listing's own.
    return len(os.listdir("/proc/self/fd")) - 1


def max_fds() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def started_at() -> float:
    """Unix time."""
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    ticks = int(text[text.rindex(")") + 2 :].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
