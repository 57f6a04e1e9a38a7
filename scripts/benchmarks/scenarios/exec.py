"""/bin/true in sandboxes that live: one client, and many with a sandbox each."""

from __future__ import annotations

import asyncio
import time

from benchmarks.measurements import Key
from benchmarks.rig import IMAGE, Rig
from sandboxd.client import AsyncClient, AsyncSandbox, SandboxdError

TRUE = ["/bin/true"]
ALONE = "exec, 1 client"
EACH = 5


def exec_live(rig: Rig) -> None:
    with rig.client.create(IMAGE) as sandbox:
        sandbox.exec(TRUE)
        for _ in range(rig.size.rounds * 2):
            with rig.measured.timed(ALONE, "exec"):
                result = sandbox.exec(TRUE, timeout_s=30)
            if not result.ok:
                rig.measured.fail(f"{ALONE}: {result}")
            rig.yardsticks.sample(ALONE, "exec", "floor_spawn", "chroot", "nitrobox exec")
    for clients in rig.size.clients:
        asyncio.run(at_once(rig, clients))


async def at_once(rig: Rig, clients: int) -> None:
    scenario = f"exec, {clients} clients"
    each = rig.size.in_a_row * EACH

    async def worker(sandbox: AsyncSandbox) -> int:
        errors = 0
        for _ in range(each):
            try:
                with rig.measured.timed(scenario, "exec"):
                    result = await sandbox.exec(TRUE, timeout_s=60)
            except SandboxdError as error:
                errors += 1
                rig.measured.fail(f"{scenario}: {error}")
                continue
            if not result.ok:
                errors += 1
                rig.measured.fail(f"{scenario}: {result}")
        return errors

    async with AsyncClient(rig.daemon.base_url, rig.daemon.token) as client:
        made = [await client.create(IMAGE) for _ in range(clients)]
        try:
            await asyncio.gather(*(one.exec(TRUE) for one in made))
            for _ in range(rig.size.bursts):
                started = time.perf_counter()
                errors = sum(await asyncio.gather(*(worker(one) for one in made)))
                elapsed_s = time.perf_counter() - started
                rate = (clients * each - errors) / elapsed_s
                rig.measured.add(Key(scenario, "rate"), rate, unit="/s")
                rig.measured.add(Key(scenario, "errors"), errors, unit="")
                # Blocks this loop, on purpose: nothing of ours runs beside a yardstick.
                rig.yardsticks.rate(scenario, "exec", clients, each, "floor_spawn", "chroot")
        finally:
            await asyncio.gather(*(one.delete() for one in made))
