"""What programs look for below /sys/fs/cgroup to size themselves: JVM, Go, Node, and their like.

A sandbox sees the files of cgroup v2 as if it were in the root of a hierarchy of its own, whatever
the host has; and those of v1 by which older programs find a limit. Numbers are those of the other
views: memory without what lies on its disk.

A command is in a cgroup of its own, ``/e5`` in /proc/self/cgroup, in which programs look first:
it has the same files.
"""

from __future__ import annotations

from typing import Final

from sandboxd.cpu_list import cpu_list
from sandboxd.views.figures import Cpu, Memory
from sandboxd.views.scope import Scope

PERIOD_US: Final = 100_000

FILES: Final = (
    "cgroup.controllers",
    "cpu.max",
    "cpu.stat",
    "cpu.weight",
    "cpuset.cpus",
    "cpuset.cpus.effective",
    "memory.current",
    "memory.high",
    "memory.low",
    "memory.max",
    "memory.stat",
    "memory.swap.current",
    "memory.swap.max",
    "pids.current",
    "pids.max",
)
V1_FILES: Final = {
    "cpu": ("cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.shares"),
    "cpuset": ("cpuset.cpus", "cpuset.effective_cpus"),
    "memory": (
        "memory.limit_in_bytes",
        "memory.soft_limit_in_bytes",
        "memory.stat",
        "memory.usage_in_bytes",
    ),
    "pids": ("pids.current", "pids.max"),
}
"""By controller, each a directory."""

V1_NO_LIMIT: Final = (1 << 63) // 4096 * 4096 - 4096
"""``PAGE_COUNTER_MAX`` pages, as v1 writes it."""

PROC_CGROUPS: Final = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n" + "".join(
    f"{name}\t0\t1\t1\n" for name in ("cpuset", "cpu", "cpuacct", "io", "memory", "pids")
)
"""/proc/cgroups: hierarchy 0 is v2's. By this the JVM tells which version there is."""


def text(name: str, scope: Scope, memory: Memory, cpu: Cpu, processes: int) -> bytes:
    """One file, v1's and v2's alike: no name means two things."""
    on_disk = min(memory.shmem, scope.disk_kb)
    used = max(0, memory.usage - on_disk) * 1024
    most = scope.memory_kb * 1024
    stat = {
        "anon": memory.anon,
        "file": memory.file + memory.shmem - on_disk,
        "kernel_stack": memory.kernel_stack,
        "pagetables": memory.page_tables,
        "shmem": memory.shmem - on_disk,
        "file_mapped": memory.mapped,
        "file_dirty": memory.dirty,
        "file_writeback": memory.writeback,
        "active_file": memory.active_file,
        "inactive_file": memory.inactive_file,
        "slab_reclaimable": memory.slab_reclaimable,
        "slab_unreclaimable": memory.slab_unreclaimable,
        # v1's names for the first two.
        "rss": memory.anon,
        "cache": memory.file + memory.shmem - on_disk,
    }
    lines: dict[str, object] = {
        "cgroup.controllers": "cpuset cpu memory pids",
        "cpu.max": f"{scope.quota_us} {PERIOD_US}",
        "cpu.weight": scope.cpu_weight,
        "memory.high": "max",
        "memory.low": 0,
        "memory.max": most,
        "memory.swap.current": 0,
        "memory.swap.max": 0,
        "pids.max": scope.pids,
        "cpu.cfs_period_us": PERIOD_US,
        "cpu.cfs_quota_us": scope.quota_us,
        "cpu.shares": (scope.cpu_weight * 1024 + 50) // 100,
        "memory.limit_in_bytes": most,
        "memory.soft_limit_in_bytes": V1_NO_LIMIT,
        "pids.current": processes,
        **dict.fromkeys(("memory.current", "memory.usage_in_bytes"), used),
        **dict.fromkeys(
            ("cpuset.cpus", "cpuset.cpus.effective", "cpuset.effective_cpus"),
            cpu_list(scope.cpus),
        ),
        "cpu.stat": f"usage_usec {cpu.user + cpu.system}\nuser_usec {cpu.user}\n"
        f"system_usec {cpu.system}",
        "memory.stat": "\n".join(f"{key} {kb * 1024}" for key, kb in stat.items()),
    }
    return f"{lines[name]}\n".encode()
