"""What one sandbox uses, read from its cgroups and its writable layer.

Plain reads of the few files of known directories, not cgroupspy's walk of the whole tree: this is
asked for every sandbox of a node every second by ``top``. A figure that this node cannot give is
None, never 0.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from sandboxd.launcher.cgroups import SandboxCgroups
from sandboxd.launcher.roots import Root
from sandboxd.launcher.watched import Watched
from sandboxd.linux import cgroup
from sandboxd.linux.cgroup_limits import Limits, LimitsV1, LimitsV2

Figures = dict[str, int | None]


def usage(cgroups: SandboxCgroups) -> Figures:
    """Figures by name, in the units that the names end in."""
    figures: Figures = {}
    for controller in ("memory", "pids", "cpu"):
        path = cgroups.v1.get(controller)
        version: Limits = LimitsV2() if path is None else LimitsV1()
        if path is None and controller in cgroups.node.v2_controllers:
            path = cgroups.v2
        figures |= _FIGURES[controller](version, path)
    # Run time is counted in every cgroup2 directory, whoever holds the cpu controller.
    run_time = {} if cgroups.v2 is None else _keyed(cgroups.v2 / "cpu.stat")
    for name in ("usage_usec", "user_usec", "system_usec"):
        figures[f"cpu_{name}"] = run_time.get(name)
    figures |= dict.fromkeys(_IO.values()) if cgroups.v2 is None else _io(cgroups.v2 / "io.stat")
    return figures | (_watched(cgroups.watched) if cgroups.watched is not None else {})


def pids(cgroups: SandboxCgroups) -> int | None:
    """Tasks alive or not reaped, without PID 1."""
    if cgroups.watched is not None:
        return cgroups.watched.tasks
    path = cgroups.v1.get("pids")
    if path is None and "pids" in cgroups.node.v2_controllers:
        path = cgroups.v2
    return _pids(LimitsV2() if path == cgroups.v2 else LimitsV1(), path)["pids"]


def _watched(watched: Watched) -> Figures:
    """What the watchdog saw last."""
    return {
        "memory_bytes": watched.memory_bytes,
        "memory_limit_bytes": watched.limits.memory_mb << 20 if watched.limits else None,
        "memory_peak_bytes": watched.memory_peak_bytes,
        "oom_kills": watched.oom_kills,
        "pids": watched.tasks,
    }


def disk_usage(root: Root | None) -> Figures:
    """Use and size of the writable layer; of its own upper where the sandbox stands on a snapshot.

    A statvfs of a tmpfs: it waits for nobody.
    """
    if root is None:
        return dict.fromkeys(("disk_used_bytes", "disk_bytes", "inodes_used", "inodes"))
    found = os.fstatvfs(root.upper.fd)
    return {
        "disk_used_bytes": (found.f_blocks - found.f_bfree) * found.f_frsize,
        "disk_bytes": found.f_blocks * found.f_frsize,
        "inodes_used": found.f_files - found.f_ffree,
        "inodes": found.f_files,
    }


def _memory(version: Limits, path: Path | None) -> Figures:
    names = ("memory_bytes", "memory_peak_bytes", "oom_kills")
    figures: Figures = dict.fromkeys(names)
    if path is not None:
        for name in names:
            with suppress(OSError):  # memory.peak is there since Linux 5.19
                figures[name] = getattr(version, name)(path)
    return figures


def _pids(version: Limits, path: Path | None) -> Figures:
    figures: Figures = {"pids": None, "pids_refused": None}
    if path is not None:
        with suppress(OSError):
            # Without PID 1, which the limit is not told with either.
            figures["pids"] = max(0, version.pids(path) - 1)
            figures["pids_refused"] = version.pids_refused(path)
    return figures


def _cpu(version: Limits, path: Path | None) -> Figures:
    found = {} if path is None else _keyed(path / "cpu.stat")
    throttled_usec = found.get("throttled_usec")
    if version.version == 1 and "throttled_time" in found:
        throttled_usec = found["throttled_time"] // 1000  # nanoseconds
    return {
        "cpu_periods": found.get("nr_periods"),
        "cpu_throttled_periods": found.get("nr_throttled"),
        "cpu_throttled_usec": throttled_usec,
    }


_FIGURES: Final = {"memory": _memory, "pids": _pids, "cpu": _cpu}


_IO: Final = {"rbytes": "io_read_bytes", "wbytes": "io_written_bytes"}


def _io(file: Path) -> Figures:
    """Sums over the devices of ``io.stat``: ``8:0 rbytes=1 wbytes=2 rios=3 wios=4 ...``."""
    figures: Figures = dict.fromkeys(_IO.values())
    with suppress(OSError):
        lines = file.read_text(encoding="ascii").splitlines()
        pairs = [pair.split("=", 1) for line in lines for pair in line.split()[1:] if "=" in pair]
        for key, name in _IO.items():
            figures[name] = sum(int(value) for found, value in pairs if found == key)
    return figures


def _keyed(file: Path) -> dict[str, int]:
    with suppress(OSError):
        return cgroup.read_keyed(file)
    return {}
