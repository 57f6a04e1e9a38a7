"""What a sandbox may hold of what no cgroup counts: what the node says is what the kernel holds,
and an operator sets it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

OWN = {
    "inotify_instances": 5,
    "inotify_watches": 100,
    "ptys": 3,
    "posix_queues": 7,
    "posix_queue_kb": 64,
    "pending_signals": 50,
    "locked_memory_kb": 128,
}
SYSCTLS = {
    "inotify_instances": "user/max_inotify_instances",
    "inotify_watches": "user/max_inotify_watches",
    "posix_queues": "fs/mqueue/queues_max",
    "sysv_queues": "kernel/msgmni",
    "fanotify_groups": "user/max_fanotify_groups",
    **{
        f"{kind}_namespaces": f"user/max_{kind}_namespaces"
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")
    },
}
RLIMITS = {
    "pending_signals": ("pending signals", 1),
    "locked_memory_kb": ("locked memory", 1024),
    "posix_queue_kb": ("msgqueue size", 1024),
}


@pytest.fixture(scope="module")
def capped_daemon(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    settings = {f"SANDBOXD_KERNEL_CAPS_{name.upper()}": str(value) for name, value in OWN.items()}
    with running_daemon(leak_check, {"busybox": busybox}, environment=settings) as daemon:
        daemon.warm_up("busybox")
        yield daemon


def said(daemon: Daemon) -> dict[str, int]:
    caps: dict[str, int] = daemon.http.get("/v1/node").json()["kernel_caps"]
    return caps


def held(daemon: Daemon, sandbox: str, **how: Any) -> dict[str, int]:
    """As the kernel tells it inside."""
    files = " ".join(f"/proc/sys/{path}" for path in SYSCTLS.values())
    values = daemon.exec(sandbox, f"cat {files}", **how)["stdout"].split()
    found = dict(zip(SYSCTLS, map(int, values), strict=True))
    limits = daemon.exec(sandbox, ["cat", "/proc/self/limits"], **how)["stdout"]
    for name, (words, unit) in RLIMITS.items():
        match = re.search(rf"Max {words} +(\d+) +(\d+)", limits)
        assert match is not None, limits
        assert match[1] == match[2]  # or it could be raised
        found[name] = int(match[1]) // unit
    return found


@pytest.mark.parametrize("user", ["root", "agent"])
def test_the_node_says_what_the_kernel_holds(daemon: Daemon, sandbox: str, user: str) -> None:
    caps = said(daemon)
    inside = held(daemon, sandbox, user=user)
    assert inside == {name: caps[name] for name in inside}
    assert set(caps) - set(inside) == {"ptys", "keys"}
    assert caps["keys"] == 0


@pytest.mark.parametrize("user", ["root", "agent"])
def test_an_operator_sets_them(capped_daemon: Daemon, user: str) -> None:
    assert said(capped_daemon).items() >= OWN.items()
    with capped_daemon.sandbox("busybox") as sandbox:
        inside = held(capped_daemon, sandbox, user=user)
        assert inside == {
            name: value for name, value in said(capped_daemon).items() if name in inside
        }
        # And the kernel goes by them: one more is refused.
        raised = capped_daemon.exec(sandbox, "ulimit -l 129", user=user)
        assert raised["exit_code"] != 0
        script = "for n in 1 2 3 4; do (exec 3<>/dev/ptmx && sleep 5) & done 2>&1; wait"
        told = capped_daemon.exec(sandbox, script, user=user)
        assert (told["stdout"] + told["stderr"]).count("o space left on device") == 1, told


def test_who_has_all_terminals_is_told_so(capped_daemon: Daemon) -> None:
    with capped_daemon.sandbox("busybox") as sandbox:
        url = f"/v1/sandboxes/{sandbox}/exec"
        terminal = {"command": ["tty"], "tty": {}}
        assert capped_daemon.http.post(url, json=terminal).json()["stdout"] == "/dev/pts/0\r\n"
        redirections = " ".join(f"{number}<>/dev/ptmx" for number in range(3, 3 + OWN["ptys"]))
        holder = f"exec {redirections}; echo held; exec sleep 1000"
        made = capped_daemon.http.post(
            f"/v1/sandboxes/{sandbox}/processes", json={"command": holder}
        ).json()
        process = f"/v1/sandboxes/{sandbox}/processes/{made['id']}"
        told = capped_daemon.http.get(process, params={"wait_s": 20, "stdout_offset": 0}).json()
        assert told["stdout"]["data"] == "held\n"
        error = refusal(
            capped_daemon.http.post(url, json=terminal), 409, "exec-setup-failed", "workload"
        )
        assert "terminals" in error["message"]
