"""How hard-pressed the machine is: PSI, free memory, and what bounds both from above.

PSI is "some" and "full" of memory, CPU and I/O (Documentation/accounting/psi.rst): the share of
the last 10 s in which some task, or every task that could have run, waited for the resource. A
kernel without it (``psi=0``, or none built in) has no such files: then there is no figure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.linux.cgroup import CgroupLayout

KINDS: Final = ("memory", "cpu", "io")
NO_LIMIT: Final = 1 << 62
"""v1 says "no limit" as a number of pages near 2**63."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Percent of the last 10 s."""

    some: float
    full: float


def stalls(proc: Path = Path("/proc")) -> dict[str, Stall]:
    """By kind; those that this kernel does not tell are left out."""
    found = {}
    for kind in KINDS:
        with suppress(OSError, ValueError, KeyError):
            found[kind] = parse_stall((proc / "pressure" / kind).read_text(encoding="ascii"))
    return found


def parse_stall(text: str) -> Stall:
    """From the lines ``some avg10=0.16 avg60=…`` and ``full …``; CPU has no "full" before 5.13."""
    averages = {}
    for line in text.splitlines():
        which, *figures = line.split()
        averages[which] = float(dict(one.split("=") for one in figures)["avg10"])
    return Stall(averages["some"], averages.get("full", 0.0))


def memory_mb(proc: Path = Path("/proc")) -> tuple[int, int]:
    """MemTotal and MemAvailable, proc_meminfo(5), in MiB."""
    wanted = {"MemTotal": 0, "MemAvailable": 0}
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in wanted:
            wanted[name] = int(rest.split()[0]) >> 10
    return wanted["MemTotal"], wanted["MemAvailable"]


def cgroup_memory_mb(layout: CgroupLayout) -> tuple[int, int] | None:
    """The limit that the cgroups of this process set to it, and what is free below it, in MiB; None
    where none does. Inactive page cache counts as free, as it does in MemAvailable."""
    tightest: tuple[int, int] | None = None
    for path in _ancestors(layout):
        with suppress(OSError, ValueError, KeyError):
            limit, used = _limit_v1(path) if layout.version_of("memory") == 1 else _limit_v2(path)
            free = max(0, limit - used) >> 20
            if limit < NO_LIMIT and (tightest is None or free < tightest[1]):
                tightest = (limit >> 20, free)
    return tightest


def _ancestors(layout: CgroupLayout) -> Iterator[Path]:
    """The process's memory cgroup and those above it, the hierarchy's root left out."""
    mount = layout.mount_of("memory")
    version = layout.version_of("memory")
    path = layout.own.get("memory" if version == 1 else "")
    while mount is not None and path is not None and path != mount and mount in path.parents:
        yield path
        path = path.parent


def _limit_v1(path: Path) -> tuple[int, int]:
    limit = int((path / "memory.limit_in_bytes").read_text(encoding="ascii"))
    used = int((path / "memory.usage_in_bytes").read_text(encoding="ascii"))
    return limit, used - _keyed(path / "memory.stat")["total_inactive_file"]


def _limit_v2(path: Path) -> tuple[int, int]:
    text = (path / "memory.max").read_text(encoding="ascii").strip()
    used = int((path / "memory.current").read_text(encoding="ascii"))
    limit = NO_LIMIT if text == "max" else int(text)
    return limit, used - _keyed(path / "memory.stat")["inactive_file"]


def _keyed(file: Path) -> dict[str, int]:
    return {
        name: int(value)
        for name, value in (line.split() for line in file.read_text(encoding="ascii").splitlines())
    }


def pids_most(proc: Path = Path("/proc")) -> int:
    """Processes and threads that the kernel lets there be: ``pid_max`` or ``threads-max``."""
    kernel = proc / "sys" / "kernel"
    return min(
        int((kernel / name).read_text(encoding="ascii")) for name in ("pid_max", "threads-max")
    )


def cpus_usable() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0))
