"""Limits and usage of one cgroup: one shape, ``Limits``, and behind it both versions.

Every method takes the directory in the hierarchy that has the controller; on v2 that is the same
one for all. Sizes are bytes. A missing control file is ``FileNotFoundError``: the caller decides
whether it can do without.
"""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

from sandboxd.linux.cgroup import CgroupLayout, read_keyed, write

CPU_PERIOD_US: Final = 100_000
"""The kernel's default; a shorter one throttles more evenly and costs more timers."""

CPU_QUOTA_MIN_US: Final = 1000
"""The least the kernel takes as a quota (``min_cfs_quota_period`` in kernel/sched)."""


CPU_WEIGHT_DEFAULT: Final = 100
"""CGROUP_WEIGHT_DFL (include/linux/cgroup.h); a new cgroup has it."""

CPU_SHARES_DEFAULT: Final = 1024
"""Its like on v1: ``NICE_0_LOAD`` of kernel/sched."""

CPU_SHARES_MAX: Final = 262_144
"""``MAX_SHARES`` of kernel/sched."""

IO_NONE: Final = (0, 0, 0, 0)

SOCKETS_MIN_BYTES: Final = 4 << 20
SOCKETS_PART: Final = 16
"""On v1, what sockets may hold on top of a memory limit: this part, or SOCKETS_MIN_BYTES."""


class Limits(ABC):
    """Sets and reads what one controller holds."""

    version: int

    @abstractmethod
    def set_memory(self, path: Path, limit_bytes: int, swap_bytes: int = 0) -> None:
        """Limit memory, and swap on top of it."""

    @abstractmethod
    def set_cpu(self, path: Path, cpus: float) -> None:
        """Limit run time to ``cpus`` seconds a second, over periods of ``CPU_PERIOD_US``."""

    @abstractmethod
    def set_cpu_weight(self, path: Path, weight: int) -> None:
        """What it gets of a CPU that its siblings want too: 1 to 10,000, and 100 at first."""

    def set_cpus(self, path: Path, cpus: str) -> None:
        """The CPUs, as a list; the same file in both versions. Its tasks move at once."""
        write(f"{path}/cpuset.cpus", cpus)

    @abstractmethod
    def set_io(self, path: Path, device: int, limits: tuple[int, int, int, int]) -> None:
        """Limit what goes to a whole block device (``st_rdev``, no partition): bytes read and
        written a second, requests read and written a second; 0 is no limit."""

    def set_pids(self, path: Path, count: int) -> None:
        """Limit the number of tasks (threads count); the same file in both versions."""
        write(f"{path}/pids.max", count)

    @abstractmethod
    def memory_bytes(self, path: Path) -> int:
        """Memory in use, page cache and tmpfs included."""

    @abstractmethod
    def memory_peak_bytes(self, path: Path) -> int:
        """The most ever in use; on v2 since Linux 5.19."""

    @abstractmethod
    def oom_kills(self, path: Path) -> int:
        """Processes the OOM killer took: v2 counts the whole subtree, v1 this cgroup alone."""

    @abstractmethod
    def cpu_usec(self, path: Path) -> int:
        """Run time so far. On v1 ``path`` is in the hierarchy of ``cpuacct``, not of ``cpu``."""

    def pids(self, path: Path) -> int:
        """Tasks alive."""
        return _number(path / "pids.current")

    def pids_refused(self, path: Path) -> int:
        """How many forks the limit refused (``pids.events``)."""
        return read_keyed(path / "pids.events").get("max", 0)


class LimitsV1(Limits):
    version = 1

    def set_memory(self, path: Path, limit_bytes: int, swap_bytes: int = 0) -> None:
        sockets = f"{path}/memory.kmem.tcp.limit_in_bytes"
        if os.path.exists(sockets):
            # Buffers of TCP and UDP are counted apart from the rest, and without a limit: up to the
            # net.ipv4.{tcp,udp}_mem of the whole host.
            write(sockets, max(SOCKETS_MIN_BYTES, limit_bytes // SOCKETS_PART))
        memory, both = f"{path}/memory.limit_in_bytes", f"{path}/memory.memsw.limit_in_bytes"
        if not os.path.exists(
            both
        ):  # swap is not accounted for (swapaccount=0): all there is to turn
            if swap_bytes == 0:
                write(f"{path}/memory.swappiness", 0)
            write(memory, limit_bytes)
            return
        # Memory may at no time be above memory + swap: lower the one first, or raise the other.
        try:
            write(memory, limit_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            write(both, limit_bytes + swap_bytes)
            write(memory, limit_bytes)
        else:
            write(both, limit_bytes + swap_bytes)

    def set_cpu(self, path: Path, cpus: float) -> None:
        write(f"{path}/cpu.cfs_period_us", CPU_PERIOD_US)
        write(f"{path}/cpu.cfs_quota_us", quota_us(cpus))

    def set_cpu_weight(self, path: Path, weight: int) -> None:
        # As the kernel itself puts v2's weights on v1's scale: sched_weight_from_cgroup() in
        # kernel/sched/sched.h, DIV_ROUND_CLOSEST(weight * 1024, CGROUP_WEIGHT_DFL).
        shares = (weight * CPU_SHARES_DEFAULT + CPU_WEIGHT_DEFAULT // 2) // CPU_WEIGHT_DEFAULT
        write(f"{path}/cpu.shares", shares)

    def set_io(self, path: Path, device: int, limits: tuple[int, int, int, int]) -> None:
        names = ("read_bps", "write_bps", "read_iops", "write_iops")
        for name, value in zip(names, limits, strict=True):
            write(f"{path}/blkio.throttle.{name}_device", f"{_device(device)} {value}")

    def memory_bytes(self, path: Path) -> int:
        return _number(path / "memory.usage_in_bytes")

    def memory_peak_bytes(self, path: Path) -> int:
        return _number(path / "memory.max_usage_in_bytes")

    def oom_kills(self, path: Path) -> int:
        return read_keyed(path / "memory.oom_control").get("oom_kill", 0)

    def cpu_usec(self, path: Path) -> int:
        return _number(path / "cpuacct.usage") // 1000


class LimitsV2(Limits):
    version = 2

    def set_memory(self, path: Path, limit_bytes: int, swap_bytes: int = 0) -> None:
        write(f"{path}/memory.max", limit_bytes)
        with contextlib.suppress(FileNotFoundError):  # no swap in this kernel: none to limit
            write(f"{path}/memory.swap.max", swap_bytes)

    def set_cpu(self, path: Path, cpus: float) -> None:
        write(f"{path}/cpu.max", f"{quota_us(cpus)} {CPU_PERIOD_US}")

    def set_cpu_weight(self, path: Path, weight: int) -> None:
        write(f"{path}/cpu.weight", weight)

    def set_io(self, path: Path, device: int, limits: tuple[int, int, int, int]) -> None:
        names = ("rbps", "wbps", "riops", "wiops")
        pairs = zip(names, limits, strict=True)
        told = " ".join(f"{name}={value or 'max'}" for name, value in pairs)
        write(f"{path}/io.max", f"{_device(device)} {told}")

    def memory_bytes(self, path: Path) -> int:
        return _number(path / "memory.current")

    def memory_peak_bytes(self, path: Path) -> int:
        return _number(path / "memory.peak")

    def oom_kills(self, path: Path) -> int:
        return read_keyed(path / "memory.events").get("oom_kill", 0)

    def cpu_usec(self, path: Path) -> int:
        return read_keyed(path / "cpu.stat")["usage_usec"]


def limits_for(layout: CgroupLayout, controller: str) -> Limits | None:
    """How ``controller`` is set on this node; None where no hierarchy has it."""
    version = layout.version_of(controller)
    return {1: LimitsV1(), 2: LimitsV2(), None: None}[version]


def _device(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"


def quota_us(cpus: float) -> int:
    """Of each ``CPU_PERIOD_US``."""
    return max(CPU_QUOTA_MIN_US, round(cpus * CPU_PERIOD_US))


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
