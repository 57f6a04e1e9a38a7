"""Linux 6.1 with the LSM bpf lets anybody set ``security.*``: the node has a rule against it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxd.linux import bpf_lsm
from sandboxd.linux.id_ranges import IdRange
from tests.framework import times

IDS = IdRange(3_000_000_000, 1000)
"""Beyond what a signed number holds, and nobody's."""
CAPABILITIES = b"\x00\x00\x00\x02" + bytes(16)
"""struct vfs_cap_data of version 2, of no capability."""


def attempt(file: Path, uid: int, name: str, value: bytes = b"1") -> str:
    """What the kernel says to one whose only mark is his id: he keeps every capability."""
    os.setresuid(uid, 0, 0)
    try:
        os.setxattr(file, name, value)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    else:
        return "ok"
    finally:
        os.setresuid(0, 0, 0)


def test_the_rule_is_for_its_ids_and_those_names_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    first, last = IDS.first, IDS.first + IDS.count - 1
    rule = bpf_lsm.refuse_security_attributes(IDS)
    try:
        for uid in (first, last):
            for name in ("x", "ima", "capabilit", "capabilitz", "capability.x", "y" * 200):
                assert attempt(file, uid, f"security.{name}") == "EPERM"
            assert attempt(file, uid, "security.capability", CAPABILITIES) == "ok"
            for name in ("user.x", "user.security.x", "trusted.x"):
                assert attempt(file, uid, name) == "ok"
        for uid in (0, 1000, first - 1, last + 1):
            assert attempt(file, uid, "security.x") == "ok"
    finally:
        os.close(rule)
    assert attempt(file, first, "security.x") == "ok"


@pytest.mark.parametrize(
    ("user", "who", "status"), [("root", "program", "ok"), ("nobody", "nobody", "warn")]
)
def test_doctor_says_who_refuses(user: str, who: str, status: str) -> None:
    """For an ordinary user's node nobody does: the rule is root's to make."""
    done = subprocess.run(
        [sys.executable, "-m", "sandboxd", "doctor", "--json"],
        user=user,
        group={"root": 0, "nobody": 65534}[user],
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=times.scaled(60),
        check=False,
    )
    told = json.loads(done.stdout)
    (found,) = [one for one in told["probes"] if one["name"] == "security attributes"]
    assert (told["features"]["security_attributes"], found["status"]) == (who, status)
    if status == "warn":
        assert "lsm=lockdown,landlock,yama,apparmor,tomoyo," in found["remedy"]
