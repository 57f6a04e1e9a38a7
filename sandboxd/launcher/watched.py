"""What a watched sandbox is limited by, as far as it is told to others: its limits, and the count
of what was killed in it for memory."""

from __future__ import annotations

import os
import resource
from typing import Final

from sandboxd.model import Limits

WATCHED: Final = ("memory_mb", "pids")
"""The limits that a watchdog holds."""


class Watched:
    """Of one slot. ``fd``: a file with a line ``oom_kill N``, like the kernel's own."""

    def __init__(self, *, pid1_counts: bool = False) -> None:
        """``pid1_counts``: PID 1 has the id of the sandbox's root."""
        self.fd = os.memfd_create("oom", os.MFD_CLOEXEC)
        self._pid1_counts = pid1_counts
        self.pid = 0
        """The slot's PID 1."""
        self.limits: Limits | None = None
        """None until it is a sandbox."""
        self.memory_bytes: int | None = None
        self.memory_peak_bytes: int | None = None
        self.tasks: int | None = None
        """Without PID 1. These three as the watchdog saw them last."""
        self.looks_above = 0
        """In a row that found too many tasks."""
        self.oom_kills = 0
        self._write()

    def take(self, limits: Limits) -> None:
        """Become a sandbox's. Once only: a hard limit cannot be raised again."""
        self.limits = limits
        hard = resource.prlimit(self.pid, resource.RLIMIT_NPROC)[1]
        most = limits.pids + self._pid1_counts
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.prlimit(self.pid, resource.RLIMIT_NPROC, (most, most))

    def count_kill(self) -> None:
        self.oom_kills += 1
        self._write()

    def _write(self) -> None:
        os.pwrite(self.fd, f"oom_kill {self.oom_kills}\n".encode("ascii"), 0)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
