"""How much there is on the node that only the launcher can see, for the metrics.

Cheap: it is asked for with every look at the node.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sandboxd.launcher.cgroups import NodeCgroups
from sandboxd.launcher.images import Images
from sandboxd.launcher.sweep import Sweep
from sandboxd.linux.cgroup_limits import LimitsV1, LimitsV2


def census(
    *, cgroups: NodeCgroups, images: Images, mount_dir: str, sweep: Sweep
) -> dict[str, int | None]:
    """Figures by name; None where this node cannot tell."""
    return {
        "mounts": len(os.listdir(mount_dir)),
        "fuse_processes": sum(image.pid > 0 for image in images.by_key.values()),
        "swept": sweep.removed,
        "memory_bytes": _memory_bytes(cgroups),
        "launcher_memory_bytes": _resident_bytes(),
    }


def _memory_bytes(cgroups: NodeCgroups) -> int | None:
    """Of all sandboxes and slots together."""
    with suppress(OSError, ValueError):
        if "memory" in cgroups.v1:
            return LimitsV1().memory_bytes(cgroups.v1["memory"])
        if cgroups.v2 is not None and "memory" in cgroups.v2_controllers:
            return LimitsV2().memory_bytes(cgroups.v2)
    return None


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
