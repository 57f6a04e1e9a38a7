"""Whatever a workload does to its own sandbox, no answer says that the node was at fault.

A trainer that reads `node` or `retryable` tries again at no cost to the policy: what a policy can
bring about must never be either. Each kind of ruin is brought about by the sandbox's root and as an
ordinary user; then everything the API offers is asked of what is left.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.framework.daemon import Daemon

LIMITS = {"memory_mb": 48, "disk_mb": 16, "inodes": 600, "pids": 40, "nofile": 64, "shm_mb": 128}

RUIN = {
    "nothing": "true",
    "kills everything": "kill -9 1; kill -TERM 1; kill -9 -1",
    "stops everything": "(sleep 600 &) ; kill -STOP -1",
    "fills the disk": "cat /dev/zero > /tmp/fill",
    "uses up the inodes": "i=0; while : > /tmp/i$i; do i=$((i+1)); done",
    "fills the memory for good": "cat /dev/zero > /dev/shm/fill",
    "runs out of memory": "tail /dev/zero",
    "uses up the processes": "while sleep 600 & do :; done",
    "leaves orphans": "i=0; while [ $i -lt 300 ]; do (true &); i=$((i+1)); done",
    "removes the shell": "rm -f /bin/sh /bin/bash /bin/ash",
    "removes all programs": "rm -f /bin/*",
    "makes the shell a fifo": "rm /bin/sh; mkfifo /bin/sh; chmod 755 /bin/sh",
    "makes the shell a directory": "rm /bin/sh; mkdir /bin/sh",
    "makes the shell a loop": "rm /bin/sh; ln -s sh /bin/sh",
    "makes the shell garbage": "rm /bin/sh; echo garbage > /bin/sh; chmod 755 /bin/sh",
    "makes the shell read itself": "rm /bin/sh; echo '#!/bin/sh' > /bin/sh; chmod 755 /bin/sh",
    "removes passwd": "rm /etc/passwd /etc/group",
    "makes passwd a fifo": "rm /etc/passwd; mkfifo /etc/passwd",
    "makes passwd a directory": "rm /etc/passwd; mkdir /etc/passwd",
    "makes passwd huge": "rm /etc/passwd; truncate -s 1T /etc/passwd",
    "makes passwd endless": "rm /etc/passwd; ln -s /dev/zero /etc/passwd",
    "makes passwd a memory": "rm /etc/passwd; ln -s /proc/self/mem /etc/passwd",
    "makes group a fifo": "rm /etc/group; mkfifo /etc/group",
    "removes the directory it starts in": "rm -rf /work",
    "makes the directory it starts in a file": "rm -rf /work; : > /work",
    "makes the directory it starts in a loop": "rm -rf /work; ln -s work /work",
    "makes the directory it starts in a descriptor": "rm -rf /work; ln -s /proc/self/fd /work",
    "closes the root": "chmod 0 / /tmp /work /bin /etc",
    "removes all that it can": "rm -rf /* 2>/dev/null",
    "tries to mount": "mount -o remount,ro /; mount -t tmpfs x /; umount -l /proc; umount -l /dev",
    "moves the kernel's directories": "mv /proc /p; mv /dev /d; mv /sys /s",
    "digs deep": "cd /work; for i in $(seq 500); do mkdir d && cd d || exit; done",
    "closes its descriptors": "exec 0<&- 1>&- 2>&-; sleep 600 &",
    "puts a fifo in the way": "mkfifo /work/x",
    "floods its output": "head -c 30000000 /dev/zero",
}
BY_A_USER = frozenset(
    {"kills everything", "stops everything", "fills the disk", "uses up the processes", "digs deep"}
)
"""What an ordinary user brings about in another way; most of the others it cannot."""


def blameless(answer: httpx.Response, where: str) -> None:
    """Assert that no word of an answer makes the node guilty."""
    # 501: what this kind of node does not offer, whatever the sandbox does.
    assert answer.status_code < 500 or answer.status_code == 501, (where, answer.text)
    if answer.is_success or not answer.content:
        return
    error = answer.json()["error"]
    assert error["cause"] != "node", (where, error)
    assert error["retryable"] is False, (where, error)


def ask_everything(daemon: Daemon, sandbox: str) -> list[str]:
    """Everything that a trainer may ask of a sandbox; what was refused."""
    url = f"/v1/sandboxes/{sandbox}"
    refused: list[str] = []

    def ask(method: str, path: str, **request: Any) -> httpx.Response:
        answer = daemon.http.request(method, url + path, **request)
        what = f"{method} {path} {request}"[:200]
        blameless(answer, what)
        if not answer.is_success:
            refused.append(f"{what}: {answer.text}")
        return answer

    at = {"path": "/work/x"}
    brief = {"timeout_s": 2, "grace_s": 0}
    for who in ({}, {"user": "agent"}):
        ask("POST", "/exec", json={"command": ["/bin/true"], **brief, **who})
        ask("POST", "/exec", json={"command": "true", **brief, **who})
    ask("POST", "/exec", json={"command": "true", "cwd": "/work", "login": True, **brief})
    ask("POST", "/exec", json={"command": "true", "tty": {}, **brief})
    ask("POST", "/exec", json={"command": "cat", "stdin": "x" * 100_000, **brief})
    frames = {"Accept": "application/x-ndjson"}
    streamed = ask("POST", "/exec", json={"command": "true", **brief}, headers=frames)
    if streamed.is_success:
        last = json.loads(streamed.text.strip().splitlines()[-1])
        assert last["type"] in ("exit", "error")
        assert last.get("cause") != "node", last
    ask("PUT", "/files", params=at, content=b"x" * 100_000)
    ask("GET", "/files", params=at)
    ask("GET", "/files", params={"path": "/etc/passwd"}, headers={"Range": "bytes=0-9"})
    ask("GET", "/files/list", params={"path": "/work"})
    ask("GET", "/files/stat", params={"path": "/bin/sh"})
    process = ask("POST", "/processes", json={"command": "true"})
    if process.is_success:
        ask("GET", f"/processes/{process.json()['id']}")
        ask("DELETE", f"/processes/{process.json()['id']}")
    session = ask("POST", "/sessions", json={})
    if session.is_success:
        line = {"command": "true", "timeout_s": 2}
        ask("POST", f"/sessions/{session.json()['id']}/exec", json=line)
        ask("DELETE", f"/sessions/{session.json()['id']}")
    ask("GET", "/stats")
    ask("GET", "/events")
    ask("POST", "/pause")
    ask("POST", "/resume")
    taken = ask("POST", "/snapshots", json={"on_running": "copy"})
    if taken.is_success:
        assert daemon.http.delete(f"/v1/snapshots/{taken.json()['id']}").is_success
    copy = {"copy_from": {"sandbox": sandbox, "paths": ["/work"]}}
    copied = daemon.http.post("/v1/sandboxes", json=copy)
    blameless(copied, "copy_from")
    if copied.is_success:
        daemon.delete(copied.json()["id"])
    ask("POST", "/exec", json={"command": ["/bin/true"], "exclusive": "freeze", **brief})
    ask("POST", "/exec", json={"command": ["/bin/true"], "exclusive": True, **brief})
    told = daemon.http.get(url).json()
    assert told["failure"] is None or told["failure"]["cause"] != "node", told
    return refused


@pytest.mark.parametrize("ruin", RUIN)
def test_no_ruin_is_the_nodes_fault(daemon: Daemon, ruin: str) -> None:
    for user in ("root", "agent") if ruin in BY_A_USER else ("root",):
        with daemon.sandbox("busybox", limits=LIMITS, workdir="/work") as sandbox:
            daemon.exec(sandbox, "chmod 777 /work")
            body = {"command": RUIN[ruin], "user": user, "timeout_s": 3, "grace_s": 0}
            blameless(daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json=body), "the ruin")
            refused = ask_everything(daemon, sandbox)
            if ruin == "nothing":  # the control: what is asked can be had
                assert refused == []
            # And it can begin anew, whatever was done to it, while its PID 1 lives: that goes where
            # the memory is full of what no process holds.
            reset = daemon.http.post(f"/v1/sandboxes/{sandbox}/reset", json={})
            if not reset.is_success:
                blameless(reset, "reset")
                assert ruin == "fills the memory for good", reset.text
                continue
            assert daemon.exec(sandbox, "echo anew")["stdout"] == "anew\n"
