"""One hostile sandbox of each kind, and what a neighbour feels of it.

For: the test of hostile sandboxes, a few seconds of each in this tier and a minute of each in tier
`load`, where the neighbour's times are judged. Each kind shows that it was one: it says, in its own
words, what it ran into.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.at_once import client_of, in_background
from tests.e2e.background import Background
from tests.e2e.storm import percentile
from tests.framework import times
from tests.framework.daemon import Daemon

LIMITS = {"memory_mb": 64, "disk_mb": 32, "shm_mb": 8, "pids": 128, "inodes": 2000, "nofile": 1024}
SPOOLED = 20
ORPHANS = 100
"""A line is said of each so many."""
MOMENT_S = 0.2
KEPT_CHARS = 20_000


@dataclass(frozen=True)
class Kind:
    """What a hostile sandbox does again and again until its time is up."""

    script: str
    proof: Sequence[str]
    """One of these is in what it says, or it was not hostile."""
    background: int = 0
    """How many background processes run the script beside, and flood their pipes."""


def _for_ever(body: str, processes: int = 1) -> str:
    loop = f"while :; do {body}; done"
    return f"for n in $(seq {processes}); do ({loop}) & done; wait"


def _hog(mode: str, after: str = ":", processes: int = 1, count: int = 1_000_000) -> str:
    return _for_ever(f"/probes/hog {mode} {count} || echo killed; {after}", processes)


KINDS = {
    # As ":(){ :|:& };:", under a name that ash takes for one.
    "forks": Kind("b(){ b|b& };b; while :; do b; sleep 1; done", ["can't fork"]),
    # It ends by a kill of its whole group.
    "processes that stay": Kind(_for_ever("setsid /probes/hog processes", 2), ["EAGAIN"]),
    "threads": Kind(_hog("threads", processes=2), ["EAGAIN"]),
    "memory": Kind(_hog("memory", processes=2), ["killed"]),
    "disk bytes": Kind(_hog("disk", "rm -f /tmp/full"), ["ENOSPC"]),
    "inodes": Kind(_hog("inodes", "rm -rf /tmp/i*"), ["ENOSPC"]),
    "fds": Kind(_hog("files", processes=4), ["EMFILE"]),
    "fds in flight": Kind(_hog("inflight", processes=2), ["ETOOMANYREFS", "EMFILE"]),
    "pipes": Kind(_hog("pipes", processes=2), ["EMFILE"]),
    "sockets": Kind(_hog("udp", processes=2), ["EMFILE", "ENOBUFS"]),
    "output flood": Kind("yes >&2 & yes", ["y\ny\n"]),
    "background flood": Kind("yes >&2 & exec yes", ["y\ny\n"], background=SPOOLED),
    "signals": Kind(
        "trap '' TERM HUP USR1 INT; for n in 1 2 3; do (while :; do :; done) & done;"
        + _for_ever(
            "for k in $(seq 50); do kill -TERM -1; kill -USR1 -1; kill -STOP 1; kill -KILL 1; done;"
            " /probes/hog signals 2000"
        ),
        ["enough", "EAGAIN"],
    ),
    "orphans": Kind(_hog("orphans", count=ORPHANS), [f"{ORPHANS} enough"]),
    "mounts": Kind(
        _for_ever("mount -t tmpfs x /mnt; mount --bind /tmp /mnt; umount /proc; unshare -m true"),
        ["not permitted", "denied"],
    ),
    "inotify": Kind(_for_ever("/probes/hog inotify; /probes/hog watches", 2), ["EMFILE", "ENOSPC"]),
    "directory depth": Kind(
        _for_ever("mkdir -p /tmp/deep; (cd /tmp/deep; /probes/hog depth 500); rm -rf /tmp/deep"),
        ["enough", "ENOSPC"],
    ),
}


@dataclass
class Felt:
    """What the neighbour's create + exec took, in seconds."""

    quiet: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return percentile(self.beside, 0.99) / percentile(self.quiet, 0.99)

    def cells(self) -> list[str]:
        """For a table: how many lives, p50 and p99 of each in ms, and the ratio of the latter."""
        parts = (self.quiet, self.beside)
        figures = [
            f"{len(taken)}: {percentile(taken, 0.5)} {percentile(taken, 0.99)}" for taken in parts
        ]
        return [*figures, f"{self.ratio:.2f}"]

    def __str__(self) -> str:
        def row(name: str, taken: Sequence[float]) -> str:
            middle, late = percentile(taken, 0.5), percentile(taken, 0.99)
            return f"{name} {len(taken)}: p50 {middle} p99 {late} ms"

        return f"{row('quiet', self.quiet)}; {row('beside', self.beside)}; ratio {self.ratio:.2f}"


def one_life(client: httpx.Client) -> float:
    """Make a sandbox, run a command in it, throw it away; seconds until the command's answer."""
    began = time.monotonic()
    made = client.post("/v1/sandboxes", json={"image": "busybox"})
    assert made.status_code == 201, made.text
    url = f"/v1/sandboxes/{made.json()['id']}"
    done = client.post(f"{url}/exec", json={"command": ["/bin/echo", "ok"], "timeout_s": 60})
    took = time.monotonic() - began
    assert done.status_code == 200, done.text
    assert (done.json()["exit_code"], done.json()["stdout"]) == (0, "ok\n"), done.text
    assert client.delete(url).status_code == 204
    return took


def lives(client: httpx.Client, seconds: float) -> list[float]:
    end, taken = time.monotonic() + seconds, []
    while time.monotonic() < end:
        taken.append(one_life(client))
    return taken


def rage(daemon: Daemon, sandbox: str, kind: Kind, seconds: float) -> str:
    """Let the sandbox do its worst for so long; what it says. Its whole tree is gone after that."""
    with client_of(daemon, timeout_s=times.scaled(60) + seconds) as client:
        floods = [
            Background.start(client, sandbox, kind.script, user="root")
            for _ in range(kind.background)
        ]
        body = {"command": kind.script, "user": "root", "grace_s": 0, "max_output_bytes": 4096}
        said, end = "", time.monotonic() + seconds
        # A shell that cannot fork gives up: then it is told again.
        while (left_s := end - time.monotonic()) > MOMENT_S:
            answer = client.post(
                f"/v1/sandboxes/{sandbox}/exec", json={**body, "timeout_s": left_s}
            )
            said = f"{said}{_said(answer)}"[-KEPT_CHARS:]
        for flood in floods:
            seen = flood.get(stdout_offset=0, max_bytes=4)
            assert seen["state"] == "running", seen
            assert seen["stdout"]["total_bytes"] > 100_000, seen
            flood.remove()
    return said


def clean(daemon: Daemon, sandbox: str) -> None:
    """Exclusive: a command that ended by itself may have left a sandbox full of processes."""
    done = daemon.exec(sandbox, "rm -rf /tmp/* /dev/shm/*", exclusive="kill")
    assert done["exit_code"] == 0, done


def _said(answer: httpx.Response) -> str:
    """A command that kills its own sandbox's commands may end before its time; that is its own
    doing, and never the node's."""
    if answer.status_code != 200:
        error: dict[str, Any] = answer.json()["error"]
        assert (error["cause"], error["retryable"]) == ("workload", False), error
        return str(error["code"])
    result = answer.json()
    return f"{result['stdout']}{result['stderr']}"


def beside(
    daemon: Daemon, sandbox: str, kind: Kind, *, seconds: float, quiet_s: float, stints: int = 1
) -> tuple[Felt, str]:
    """A neighbour beside the hostile sandbox, and alone for `quiet_s`; and what the hostile one
    said. Both in parts that take turns, the last one quiet, so that what else the machine does is
    in both alike."""
    felt, said = Felt(), ""
    with client_of(daemon) as client:
        lives(client, min(1.0, quiet_s))
        for _ in range(stints):
            felt.quiet += lives(client, quiet_s / (stints + 1))
            with in_background(lambda: rage(daemon, sandbox, kind, seconds / stints)) as raging:
                while not raging.done():
                    felt.beside.append(one_life(client))
            said += raging.result()
        felt.quiet += lives(client, quiet_s / (stints + 1))
    assert any(word in said for word in kind.proof), said[-2000:]
    return felt, said
