"""Create, exec, delete: by one client step by step, and by many at once; and without a slot."""

from __future__ import annotations

import asyncio
import time

from benchmarks.measurements import Key, Measurements
from benchmarks.rig import IMAGE, Rig
from sandboxd.client import AsyncClient, SandboxdError
from sandboxd.rootfs import skeleton

TRUE = ["/bin/true"]
WARM_UP = 5
PEERS = ("bwrap", "crun, no limits", "crun", "runc", "chroot", "nitrobox")
MANY_PEERS = ("bwrap", "crun, no limits", "crun", "chroot")
ALONE = "lifecycle, 1 client"
QUIET_S = 0.03
SLOTLESS = "create without a slot"


def lifecycle(rig: Rig) -> None:
    alone(rig)
    for clients in rig.size.clients:
        at_once(rig, clients)


def alone(rig: Rig) -> None:
    """Each step beside its floor, all together beside what a peer takes for the whole."""
    for _ in range(min(WARM_UP, rig.size.rounds)):
        one_life(rig, Measurements())
    rig.settle()
    for _ in range(rig.size.rounds):
        one_life(rig, rig.measured)
        rig.yardsticks.sample(ALONE, "create", "floor_sandbox")
        rig.yardsticks.sample(ALONE, "exec", "floor_spawn")
        rig.yardsticks.sample(ALONE, "together", *PEERS)


def one_life(rig: Rig, measured: Measurements) -> None:
    with measured.timed(ALONE, "together"):
        with measured.timed(ALONE, "create"):
            sandbox = rig.client.create(IMAGE)
        with measured.timed(ALONE, "exec"):
            result = sandbox.exec(TRUE, timeout_s=30)
        with measured.timed(ALONE, "delete"):
            sandbox.delete()
    if not result.ok:
        measured.fail(f"{ALONE}: {result}")


def at_once(rig: Rig, clients: int) -> None:
    """Lifecycles a second; and each peer with as many processes at once."""
    scenario = f"lifecycle, {clients} clients"
    in_a_row = rig.size.in_a_row
    for _ in range(rig.size.bursts):
        asyncio.run(lives(rig, scenario, clients, in_a_row))
        slow = max(1, in_a_row // 3)
        rig.yardsticks.rate(scenario, "together", clients, in_a_row, "floor_sandbox", *MANY_PEERS)
        rig.yardsticks.rate(scenario, "together", clients, slow, "runc")


async def lives(rig: Rig, scenario: str, clients: int, in_a_row: int) -> None:
    errors = 0

    async def live(client: AsyncClient, measured: Measurements) -> None:
        with measured.timed(scenario, "together"):
            with measured.timed(scenario, "create"):
                sandbox = await client.create(IMAGE)
            with measured.timed(scenario, "exec"):
                result = await sandbox.exec(TRUE, timeout_s=60)
            with measured.timed(scenario, "delete"):
                await sandbox.delete()
        assert result.ok, result

    async def worker(client: AsyncClient) -> None:
        nonlocal errors
        for _ in range(in_a_row):
            try:
                await live(client, rig.measured)
            except (SandboxdError, AssertionError) as error:
                errors += 1
                rig.measured.fail(f"{scenario}: {error}")

    async with AsyncClient(rig.daemon.base_url, rig.daemon.token) as client:
        # Connections are made before, as a worker has them.
        await asyncio.gather(*(client.node() for _ in range(clients)))
        started = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(clients)))
        elapsed_s = time.perf_counter() - started
    done = clients * in_a_row - errors
    rig.measured.add(Key(scenario, "rate"), done / elapsed_s, unit="/s")
    rig.measured.add(Key(scenario, "errors"), errors, unit="")


def slotless(rig: Rig) -> None:
    """A create that no slot suits, for its /dev/shm has another size than a slot's.

    Before each sample, of ours and of others, nothing is moved between cgroups for a while: a move
    that closely follows another costs a hundredth (on v1, where it waits for a grace period). What
    a peer takes includes running the command and its end.
    """
    limits = {"shm_mb": skeleton.SHM_MB - 1}
    rig.client.create(IMAGE, limits=limits).delete()
    for _ in range(rig.size.rounds):
        rig.settle()
        time.sleep(QUIET_S)
        with rig.measured.timed(SLOTLESS, "create"):
            sandbox = rig.client.create(IMAGE, limits=limits)
        sandbox.delete()
        rig.settle()
        for name in ("floor_sandbox", "bwrap", "crun", "runc"):
            time.sleep(QUIET_S)
            rig.yardsticks.sample(SLOTLESS, "create", name)
