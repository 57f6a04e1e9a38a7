"""What `sandboxd doctor` finds out about this machine, beside what is known of Linux 6.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.framework import times


def test_doctor_finds_what_linux_6_1_can_and_leaves_nothing() -> None:
    links, modules = set(os.listdir("/sys/class/net")), _modules()
    done = subprocess.run(
        [sys.executable, "-m", "sandboxd", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=times.scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    failed = [one for one in told["probes"] if one["status"] == "fail"]
    assert (told["ok"], failed) == (True, [])
    found = told["features"]
    # tmpfs has had user xattrs since Linux 6.6, overlayfs takes detached layers since 6.13.
    assert (found["writable_layer"], found["overlay_detached"]) == ("ext4", False)
    assert set(found["limits"].values()) == {"enforced"}
    assert found["cgroup_kill"]
    assert set(os.listdir("/sys/class/net")) == links
    assert "ifb" not in _modules() - modules


def _modules() -> set[str]:
    return {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}
