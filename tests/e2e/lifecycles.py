"""Many short lives one after another, and what they leave in the daemon, the launcher and the
kernel.

For: the drift test, short in this tier and at full size in tier `load`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxd.linux import cgroup
from tests.e2e.at_once import at_once, client_of
from tests.e2e.host_processes import family_with
from tests.framework import times
from tests.framework.daemon import Daemon

SMALL = {"memory_mb": 32, "disk_mb": 8, "pids": 16, "cpus": 1}
AT_ONCE = 4


@dataclass(frozen=True)
class Figures:
    """At one moment, with the node at rest. `fds` and `threads` are of daemon, hostd and launcher
    together, `*_kb` is anonymous resident memory. `primed`: ready slots that have a root already,
    which is some descriptors more; how many there are is as it comes."""

    primed: int
    fds: int
    threads: int
    processes: int
    mounts: int
    cgroups: int
    daemon_kb: int
    launcher_kb: int
    slab_kb: int


COUNTED = ("fds", "processes", "mounts", "cgroups")
SETTLE_S = times.scaled(10.0)


def measure(daemon: Daemon, before: Figures | None = None) -> Figures:
    """Now; or soon, once nothing is more than `before`. A connection that the last client has just
    closed is a descriptor of the daemon's for a moment; what leaked is there for ever."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = _measure(daemon)
        more = before is not None and any(
            getattr(found, name) > getattr(before, name) for name in COUNTED
        )
        if not more or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _measure(daemon: Daemon) -> Figures:
    daemon.settle()
    family = sorted(daemon.refresh_family())
    [hostd] = family_with(set(family), "sandboxd.host")[:1]
    launcher = family_with(set(family), "sandboxd.launcher")[0]
    parts = (daemon.api_pid, hostd, launcher)
    node = cgroup.layout(launcher).own[""].parent
    return Figures(
        primed=daemon.http.get("/v1/node").json()["counts"]["slots_primed"],
        fds=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in parts),
        threads=sum(len(os.listdir(f"/proc/{pid}/task")) for pid in parts),
        processes=len(family),
        mounts=len(Path(f"/proc/{launcher}/mountinfo").read_text().splitlines()),
        cgroups=sum(1 for _ in cgroup.subtree(node)),
        daemon_kb=_resident_kb(daemon.api_pid),
        launcher_kb=_resident_kb(launcher),
        slab_kb=_unreclaimable_kb(),
    )


def live(daemon: Daemon, count: int) -> None:
    """So many sandboxes made, used and deleted, a few at a time."""
    with client_of(daemon) as client:

        def one(n: int) -> None:
            made = client.post("/v1/sandboxes", json={"image": "busybox", "limits": SMALL})
            assert made.status_code == 201, made.text
            url = f"/v1/sandboxes/{made.json()['id']}"
            done = client.post(f"{url}/exec", json={"command": f"echo {n} > /work/n; cat /work/n"})
            assert done.json()["stdout"] == f"{n}\n", done.text
            if n % 10 == 0:  # and what outlives a request
                started = client.post(f"{url}/processes", json={"command": ["sleep", "600"]})
                assert started.status_code == 201, started.text
            assert client.delete(url).status_code == 204

        at_once(one, range(count), threads=AT_ONCE)


def grown(found: Sequence[Figures]) -> list[str]:
    """What must be the same to the last one whenever as many slots are primed, and is not."""
    return [
        f"{name} with {primed} primed: {values}"
        for name in COUNTED
        for primed in sorted({one.primed for one in found})
        if len(set(values := [getattr(one, name) for one in found if one.primed == primed])) > 1
    ]


def slope(values: Sequence[float]) -> float:
    """Growth from one value to the next, by least squares."""
    return statistics.linear_regression(range(len(values)), values).slope


def _resident_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError(f"no RssAnon of {pid}")


def _unreclaimable_kb() -> int:
    """Of the whole machine, so only over many lives does it say anything."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("SUnreclaim:"):
            return int(line.split()[1])
    raise AssertionError("no SUnreclaim")
