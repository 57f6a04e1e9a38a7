"""Sandboxes come and go for minutes: does anything grow that should not, does anything slow down?

Workers make, use and delete sandboxes all the time. At the end of each of several equal parts all
pause, the node comes to rest, and what it holds is counted. What differs between the first and the
last rest is a leak; the first comes after a part, so that what is made once (an allocator's arenas,
a pool's size) is no leak. Speed drifts if the last parts are slower than the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from local_daemon import DaemonError

from benchmarks.measurements import Key
from benchmarks.rig import IMAGE, SMALL, Rig
from benchmarks.scenarios.crowd import available_mb
from sandboxd.client import AsyncClient, SandboxdError

SCENARIO = "soak"
WORKERS = 8
PARTS_LEAST, PART_S = 4, 60.0
MOST_SLOWER = 1.5
# Between rests at the same pool size nothing should differ; an allocator's fragments may, a little.
MOST_GROWTH = {"rss_mb": 24.0}
# The machine's, and others': told, not judged.
NOT_JUDGED = ("available_mb",)
COUNTED = ("processes", "descriptors", "mounts", "cgroups", "sandboxes")
REST_S = 60.0
SLOTS = 8
SETTINGS = {"slots_min": str(SLOTS), "slots_max": str(SLOTS)}
"""A pool that neither grows nor shrinks: it would look like a leak."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What a node at rest holds, all its processes together."""

    processes: int
    descriptors: int
    rss_mb: float
    mounts: int
    cgroups: int
    sandboxes: int
    available_mb: float


def soak(rig: Rig, minutes: float) -> None:
    """Raises DaemonError where the node does not come to rest."""
    total_s = minutes * 60
    parts = max(PARTS_LEAST, round(total_s / PART_S))
    rests: list[Rest] = []
    creates: list[float] = []
    for _ in range(parts):
        took = asyncio.run(churn(rig, total_s / parts))
        if not took:
            raise DaemonError("soak: not one sandbox came to be")
        creates.append(median(took))
        rests.append(rest(rig))
    measured = rig.measured
    for one in fields(Rest):
        unit = {"rss_mb": "MiB", "available_mb": "MiB"}.get(one.name, "")
        measured.add(
            Key(SCENARIO, one.name), *(getattr(each, one.name) for each in rests), unit=unit
        )
    for what in leaks(rests[0], rests[-1]):
        measured.fail(f"{SCENARIO}: {what}")
    if slower := drift(creates):
        measured.fail(f"{SCENARIO}: {slower}")


def leaks(first: Rest, last: Rest) -> list[str]:
    """What there is more of at the last rest than at the first."""
    before, after = asdict(first), asdict(last)
    return [
        f"{name} grew from {before[name]:g} to {after[name]:g}"
        for name in before
        if name not in NOT_JUDGED and after[name] - before[name] > MOST_GROWTH.get(name, 0)
    ]


def drift(medians: list[float]) -> str | None:
    """Of the last quarter of the parts against the first."""
    quarter = max(1, len(medians) // 4)
    before, after = median(medians[:quarter]), median(medians[-quarter:])
    if after <= MOST_SLOWER * before:
        return None
    return f"a create takes {after:.2f} ms at the end, {before:.2f} at the beginning"


async def churn(rig: Rig, seconds: float) -> list[float]:
    """Milliseconds of each create."""
    took: list[float] = []
    began = time.perf_counter()
    ended = 0

    async def worker(client: AsyncClient, number: int) -> None:
        nonlocal ended
        while time.perf_counter() - began < seconds:
            try:
                asked = time.perf_counter()
                async with client.create(IMAGE, limits=SMALL) as sandbox:
                    took.append((time.perf_counter() - asked) * 1000)
                    await sandbox.write_file("/work/number", str(number))
                    result = await sandbox.exec("cat /work/number; sleep 60 & exit 3")
                    if (result.exit_code, result.stdout) != (3, str(number)):
                        rig.measured.fail(f"{SCENARIO}: {result}")
                    if number % 2:
                        await sandbox.reset()
            except SandboxdError as error:
                rig.measured.fail(f"{SCENARIO}: {error}")
            ended += 1

    async with AsyncClient(rig.daemon.base_url, rig.daemon.token) as client:
        await asyncio.gather(*(worker(client, number) for number in range(WORKERS)))
    rig.measured.add(Key(SCENARIO, "create"), *took)
    rate = ended / (time.perf_counter() - began)
    rig.measured.add(Key(SCENARIO, "rate"), rate, unit="/s")
    return took


def rest(rig: Rig) -> Rest:
    """What is there when two looks a second apart see the same: slots are made, and given a root
    ahead of need, a moment after the last create. Raises DaemonError where that is never so."""
    rig.settle()
    deadline = time.monotonic() + REST_S
    before = look(rig)
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = look(rig)
        counts = rig.client.node().counts
        full = int(counts["slots_ready"]) == SLOTS and int(counts["in_teardown"]) == 0
        if full and all(getattr(now, name) == getattr(before, name) for name in COUNTED):
            return now
        before = now
    raise DaemonError(f"soak: the node does not come to rest: {before}")


def look(rig: Rig) -> Rest:
    family = descendants(rig.daemon.pid)
    return Rest(
        processes=len(family),
        descriptors=sum(entries(f"/proc/{pid}/fd") for pid in family),
        rss_mb=round(sum(resident_mb(pid) for pid in family), 2),
        mounts=sum(mounts(pid) for pid in family),
        cgroups=cgroups(rig.daemon.home.name),
        sandboxes=sum(rig.client.node().sandboxes.values()),
        available_mb=round(available_mb(), 1),
    )


def descendants(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for task in os.scandir(f"/proc/{one}/task"):
                children = Path(task.path, "children").read_text()
                todo += [int(child) for child in children.split()]
    return found


def entries(directory: str) -> int:
    try:
        return len(os.listdir(directory))
    except OSError:
        return 0  # it ended meanwhile


def mounts(pid: int) -> int:
    try:
        return len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
    except OSError:
        return 0


def resident_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0


def cgroups(name: str) -> int:
    """The node's own directories, in all hierarchies together; their paths hold `name`."""
    found = 0
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split(" ")[0] in ("cgroup", "cgroup2"):
            walk = os.walk(before.split(" ")[4])
            found += sum(1 for directory, _, _ in walk if name in directory)
    return found
