"""What a sandbox uses, from the files of its cgroups that the launcher opened and passed.

Read again through the same descriptors for as long as the sandbox is there. What cannot be read (a
controller that this node lacks, a cgroup that is being removed) counts as 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

_READ_MAX = 16 * 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """In KiB. ``file`` is page cache without ``shmem``, which is every tmpfs page."""

    usage: int = 0
    anon: int = 0
    file: int = 0
    shmem: int = 0
    active_anon: int = 0
    inactive_anon: int = 0
    active_file: int = 0
    inactive_file: int = 0
    unevictable: int = 0
    mapped: int = 0
    dirty: int = 0
    writeback: int = 0
    slab_reclaimable: int = 0
    slab_unreclaimable: int = 0
    kernel_stack: int = 0
    page_tables: int = 0


@dataclass(frozen=True, slots=True)
class Cpu:
    """Run time in microseconds."""

    user: int = 0
    system: int = 0


def memory(usage_fd: int | None, stat_fd: int | None) -> Memory:
    """From ``memory.current`` or v1's ``memory.usage_in_bytes``, and ``memory.stat`` of either."""
    found = _keyed(stat_fd)

    def kb(*names: str) -> int:
        """The first of these names that there is: v2's, then v1's."""
        return next((found[name] // 1024 for name in names if name in found), 0)

    shmem = kb("shmem")
    return Memory(
        usage=_number(usage_fd) // 1024,
        anon=kb("anon", "rss"),
        file=max(0, kb("file", "cache") - shmem),
        shmem=shmem,
        active_anon=kb("active_anon"),
        inactive_anon=kb("inactive_anon"),
        active_file=kb("active_file"),
        inactive_file=kb("inactive_file"),
        unevictable=kb("unevictable"),
        mapped=kb("file_mapped", "mapped_file"),
        dirty=kb("file_dirty", "dirty"),
        writeback=kb("file_writeback", "writeback"),
        slab_reclaimable=kb("slab_reclaimable"),
        slab_unreclaimable=kb("slab_unreclaimable"),
        kernel_stack=kb("kernel_stack"),
        page_tables=kb("pagetables"),
    )


def cpu(stat_fd: int | None) -> Cpu:
    """From ``cpu.stat`` of the cgroup2 directory: its run times are there on every node."""
    found = _keyed(stat_fd)
    return Cpu(found.get("user_usec", 0), found.get("system_usec", 0))


def processes(pids_fd: int | None) -> int:
    """Tasks, PID 1 not counted."""
    return max(0, _number(pids_fd) - 1)


def _number(fd: int | None) -> int:
    text = _read(fd)
    return int(text) if text.strip().isdigit() else 0


def _keyed(fd: int | None) -> Mapping[str, int]:
    pairs = (line.split() for line in _read(fd).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(fd: int | None) -> str:
    if fd is not None:
        with suppress(OSError):
            return os.pread(fd, _READ_MAX, 0).decode("ascii", "replace")
    return ""
