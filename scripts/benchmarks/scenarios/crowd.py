"""A burst of creates, what a thousand idle sandboxes take, and what one more costs beside them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.measurements import Key
from benchmarks.rig import IMAGE, SMALL, Rig
from sandboxd.client import AsyncClient, Client, SandboxdError

FEW = 10
RUN = "bench-crowd"
YARDSTICKS = ("floor_sandbox", "bwrap", "crun, no limits", "crun")
FLOORS_AT_ONCE = 8
EACH = "one of them"
"""As its client waits for it; of the yardsticks, with 8 at once."""


def crowd(rig: Rig) -> None:
    count, few = rig.size.crowd, f"{FEW} live"
    burst, many = f"burst of {count:,} creates", f"{count:,} live"
    try:
        for _ in range(FEW):
            rig.client.create(IMAGE, limits=SMALL, run=RUN)
        creates(rig, few)
        before = idle_memory(rig)
        asyncio.run(create_all(rig, burst, count))
        for name in YARDSTICKS:
            rig.yardsticks.rate(burst, EACH, min(FLOORS_AT_ONCE, count), 6, name)
        after = idle_memory(rig)
        # Slots are idle sandboxes too: the pool is larger after a burst.
        more = after[1] - before[1]
        rig.measured.add(Key(many, "memory"), (before[0] - after[0]) / more, unit="MiB a sandbox")
        creates(rig, many)
    finally:
        started = time.perf_counter()
        left = rig.client.delete_many(run=RUN, within_s=120)
        elapsed_s = time.perf_counter() - started
    rig.measured.add(Key(many, "delete all"), elapsed_s, unit="s")
    for name in (*left.pending, *left.failed):
        rig.measured.fail(f"{many}: {name} could not be deleted")
    rig.settle()


def creates(rig: Rig, scenario: str) -> None:
    """One at a time, from the pool."""
    rig.settle()
    for _ in range(max(3, rig.size.rounds // 3)):
        with rig.measured.timed(scenario, "create"):
            sandbox = rig.client.create(IMAGE, limits=SMALL)
        sandbox.delete()
        rig.yardsticks.sample(scenario, "create", "floor_sandbox")


async def create_all(rig: Rig, scenario: str, count: int) -> None:
    """All at once, each in a request of its own over a connection of its own."""
    async with AsyncClient(rig.daemon.base_url, rig.daemon.token) as client:
        started = time.perf_counter()

        async def one() -> bool:
            asked = time.perf_counter()
            try:
                await client.create(IMAGE, limits=SMALL, run=RUN)
            except SandboxdError as error:
                rig.measured.fail(f"{scenario}: {error}")
                return False
            took_ms = (time.perf_counter() - asked) * 1000
            rig.measured.add(Key(scenario, EACH), took_ms)
            return True

        made = await asyncio.gather(*(one() for _ in range(count)))
        elapsed_s = time.perf_counter() - started
    rig.measured.add(Key(scenario, "all"), elapsed_s, unit="s")
    rig.measured.add(Key(scenario, "rate"), sum(made) / elapsed_s, unit="/s")
    rig.measured.add(Key(scenario, "errors"), made.count(False), unit="")


def idle_memory(rig: Rig) -> tuple[float, int]:
    """MiB that are available at rest, and sandboxes there are, slots included."""
    rig.settle()
    return available_mb(), alive(rig.client)


def alive(client: Client) -> int:
    node = client.node()
    return int(node.sandboxes.get("running", 0)) + int(node.counts["slots_ready"])


def available_mb() -> float:
    """What the kernel could give (proc(5), MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise ValueError("no MemAvailable")
