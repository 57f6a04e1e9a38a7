"""Where figures come from, without which they mean nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.floors import cgroup_hierarchies

REPOSITORY = Path(__file__).resolve().parents[2]


def describe_machine() -> dict[str, Any]:
    unified, legacy = cgroup_hierarchies()
    cpu_info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in cpu_info if line.startswith("model name")]
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu": models[0] if models else "unknown",
        "cpus": os.cpu_count(),
        "memory_mb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "cgroup": "v1" if legacy else "v2" if unified else "none",
        "python": platform.python_version(),
        "load_average": [round(one, 2) for one in os.getloadavg()],
        "commit": _commit(),
    }


def busy(machine: dict[str, Any]) -> str | None:
    """Why figures from here are to be doubted: others were using the machine when it began."""
    load = float(machine["load_average"][0])
    if load < 0.5 * int(machine["cpus"]):
        return None
    return f"the load average was {load:g} before the run began: others use this machine"


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
