"""What a service of an ordinary user's is told of its cgroup, by systemd as it marks its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.framework.images import REPOSITORY

UNIT = Path("/run/systemd/system/sandboxd-test-delegation.service")
SAID = Path("/run/sandboxd-test-delegation")
CGROUP = f"/sys/fs/cgroup/system.slice/{UNIT.name}"
FIND = "from sandboxd.linux import delegation; print(delegation.find())"
TAKEN = f"Delegated(path=PosixPath('{CGROUP}')"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("Delegate=yes", TAKEN),
        ("Delegate=no", "is not this user's"),
        # As a user's own manager leaves it: the files are the user's, and the manager writes them.
        (
            f"ExecStartPre=+/bin/sh -c 'chown nobody {CGROUP} {CGROUP}/cgroup.procs "
            f"{CGROUP}/cgroup.subtree_control'",
            "its unit has no Delegate=",
        ),
    ],
    ids=["delegated", "systemd's", "not marked"],
)
def test_only_what_systemd_delegates_is_taken(lines: str, expected: str) -> None:
    try:
        UNIT.write_text(
            "[Service]\nType=oneshot\nUser=nobody\n"
            f"WorkingDirectory={REPOSITORY}\n{lines}\n"
            f'ExecStart={sys.executable} -c "{FIND}"\nStandardOutput=truncate:{SAID}\n'
        )
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        subprocess.run(["systemctl", "start", UNIT.name], check=True)
        said = SAID.read_text()
        assert expected in said
        if expected == TAKEN:
            assert all(f"'{name}'" in said for name in ("memory", "pids", "cpu"))
    finally:
        SAID.unlink(missing_ok=True)
        UNIT.unlink(missing_ok=True)
        subprocess.run(["systemctl", "daemon-reload"], check=True)
