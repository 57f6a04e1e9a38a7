"""systemd and the API as an operator has them: systemctl, the journal, a client with the token.

For: the tests beside it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx

from tests.framework import host_state, times
from tests.security.test_host_unchanged import sysctls

NODE, API, SOCKET = "sandboxd-node.service", "sandboxd.service", "sandboxd.socket"
URL = "http://127.0.0.1:8642"
STATE = Path("/var/lib/sandboxd")
CONFIG = Path("/etc/sandboxd/sandboxd.toml")
CGROUP = Path("/sys/fs/cgroup/system.slice", NODE)


def systemctl(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        log = journal("-n", "60")
        raise AssertionError(f"systemctl {' '.join(arguments)}: {done.stderr}\n{log}")
    return done.stdout.strip()


def journal(*arguments: str) -> str:
    command = ["journalctl", "--no-pager", "-o", "cat", "-u", NODE, "-u", API, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def shown(unit: str, name: str) -> str:
    return systemctl("show", "--value", "-p", name, unit)


def main_pid(unit: str) -> int:
    return int(shown(unit, "MainPID"))


def client() -> httpx.Client:
    token = (STATE / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=URL, headers=headers, timeout=times.scaled(60))


def create(api: httpx.Client, **spec: object) -> str:
    answer = api.post("/v1/sandboxes", json={"image": "busybox", **spec})
    assert answer.status_code == 201, answer.text + journal("-n", "60")
    return str(answer.json()["id"])


def execute(api: httpx.Client, sandbox: str, command: str) -> dict[str, object]:
    body = {"command": command, "timeout_s": times.scaled(20)}
    answer = api.post(f"/v1/sandboxes/{sandbox}/exec", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, object] = answer.json()
    return result


def host_now() -> dict[str, set[str]]:
    """What a node could change on its host or leave there, each as one line of text."""
    loops = Path("/sys/block").glob("loop*/loop/backing_file")
    processes = host_state.process_table().values()
    return {
        "settings": {f"{path}: {value}" for path, value in sysctls().items()},
        "links": set(os.listdir("/sys/class/net")),
        "addresses": _lines("ip -4 -o addr"),
        "routes": _lines("ip -4 route show table all"),
        "nft": _lines("nft list ruleset"),
        "mounts": _lines("findmnt --list --noheadings --output TARGET,FSTYPE"),
        "loop devices": {file.read_text() for file in loops},
        "FUSE connections": set(os.listdir("/sys/fs/fuse/connections")),
        "servers": {one.name for one in processes if one.name.startswith(host_state.OUR_PROGRAMS)},
        "namespaces": _lines("lsns --noheadings --output TYPE,NS"),
        "cgroup": {str(one) for one in CGROUP.parent.glob("sandboxd*")},
    }


def left_on_host(before: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is there and was not before, or has changed; of settings, those that were there."""
    known = {line.partition(":")[0] for line in before["settings"]}
    after = host_now()
    # A kernel module brings settings of its own with it.
    after["settings"] = {one for one in after["settings"] if one.partition(":")[0] in known}
    return {name: lines - before[name] for name, lines in after.items() if lines - before[name]}


def _lines(command: str) -> set[str]:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    # Columns are as wide as the longest entry is at the moment.
    return {" ".join(line.split()) for line in done.stdout.splitlines()}
