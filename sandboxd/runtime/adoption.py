"""Taking over what lives in the launcher: at a daemon's start, and at each new connection.

There is no database, so this is all a daemon has to go by: the launcher's rows, with the record of
each sandbox in its ``meta``. A sandbox is taken over as it is: its limits, its end of life, its
pause, its background processes and their output, and under which Idempotency-Key it was asked for.

One that was not finished (its record says so: the files it was asked for with were not all written)
and one that was being deleted are removed: nobody was told of the one, and all that may be said of
the other is that it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from sandboxd.errors import NodeError, NodeUnavailable, SandboxDead, SandboxdError, SandboxLost
from sandboxd.init.protocol import close_fds
from sandboxd.launcher.protocol import SandboxRow
from sandboxd.model import SandboxState
from sandboxd.runtime.failures import NODE_LOST, death
from sandboxd.runtime.idempotency import IdempotencyKeys
from sandboxd.runtime.sandbox import Sandbox

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

log = logging.getLogger(__name__)

ATTACH_AT_ONCE: Final = 64
ATTACH_WAIT_S: Final = 2.0
"""One sandbox that starves its own PID 1 shall not keep the node from serving the others."""
ATTACH_AGAIN_S: Final = 1.0


@dataclass(slots=True)
class Adoption:
    """What a runtime takes over, into its own tables."""

    runtime: Runtime
    table: dict[str, Sandbox]
    abandoned: set[str]
    """Ids that are to be deleted in the launcher."""
    keys: IdempotencyKeys

    async def take_over(self) -> int:
        """Know all that the launcher has; returns how many sandboxes were new.

        Raises NodeUnavailable where the launcher is lost meanwhile.
        """
        runtime = self.runtime
        await runtime.node()
        rows = {row.sandbox: row for row in await runtime.launcher.list_sandboxes()}
        images = await runtime.launcher.call("images")
        runtime.images.reset(images.ok.get("images") or [])
        runtime.snapshots.adopt(await runtime.launcher.list_snapshots())
        await runtime.adopt_kept(await runtime.launcher.list_kept())
        self._compare(rows)
        gate = asyncio.Semaphore(ATTACH_AT_ONCE)
        unknown = [row for key, row in rows.items() if key not in self.table]
        await asyncio.gather(*(self._adopt(row, gate) for row in unknown))
        return len(unknown)

    def _compare(self, rows: dict[str, SandboxRow]) -> None:
        """What became of the known ones while the launcher was not connected."""
        for sandbox in list(self.table.values()):
            if sandbox.state is SandboxState.CREATING:
                continue
            row = rows.get(sandbox.id)
            if row is None and sandbox.state is SandboxState.DELETING:
                self.runtime.forget(sandbox)
            elif row is None:
                sandbox.fail(death(NODE_LOST))
                self.runtime.processes.node_lost(sandbox)  # also where it had failed before
            elif row.state == SandboxState.FAILED:
                sandbox.fail(death(row.reason))  # while nobody was there to be told

    async def _adopt(self, row: SandboxRow, gate: asyncio.Semaphore) -> None:
        if row.state == SandboxState.DELETING:
            self.abandoned.add(row.sandbox)
        if row.sandbox in self.abandoned:
            return
        about = {"sandbox": row.sandbox}
        try:
            sandbox = Sandbox.from_meta(row.sandbox, row.meta)
        except (ValueError, KeyError, TypeError) as error:
            log.warning(
                "sandbox %s has no record (%s) and is deleted", row.sandbox, error, extra=about
            )
            self.abandoned.add(row.sandbox)
            return
        if not sandbox.finished:
            log.info("sandbox %s was not finished and is deleted", row.sandbox, extra=about)
            self.abandoned.add(row.sandbox)
            return
        sandbox.mount = self.runtime.images.hold(row.images, sandbox.spec.image)
        self.table[sandbox.id] = sandbox
        self.runtime.admission.adopt(sandbox.id, sandbox.spec)
        sandbox.observe(self.runtime.meters, self.runtime.node_events)
        sandbox.events.add("adopted", "by a daemon that has started anew")
        self.runtime.watch_expiry(sandbox)
        if sandbox.mark is not None:
            with contextlib.suppress(SandboxdError):
                if self.keys.find(sandbox.mark) is None:
                    view = replace(sandbox.view(), state=SandboxState(row.state))
                    self.keys.remember(sandbox.mark, view)
        if row.state != SandboxState.RUNNING:
            sandbox.fail(death(row.reason or row.state))
            return
        async with gate:
            reached = self.runtime.spawn(self._reach(sandbox))
            await asyncio.wait({reached}, timeout=ATTACH_WAIT_S)
            if reached.done():
                reached.result()
            else:
                log.warning(
                    "sandbox %s does not answer yet; the others go on", sandbox.id, extra=about
                )

    async def _reach(self, sandbox: Sandbox) -> None:
        """Find a way to its PID 1, however long that takes.

        Raises NodeUnavailable where the launcher is lost, and it is unknown again.
        """
        while self.table.get(sandbox.id) is sandbox:
            try:
                await self._attach(sandbox)
            except NodeUnavailable:
                if self.table.get(sandbox.id) is sandbox:
                    self.runtime.forget(sandbox)
                raise
            except SandboxLost as error:
                sandbox.fail(error)
            except NodeError:
                # Its PID 1 is short of CPU or memory, by what runs beside it.
                await asyncio.sleep(ATTACH_AGAIN_S)
                continue
            except SandboxdError as error:
                sandbox.fail(SandboxDead(f"the sandbox cannot be reached: {error.message}"))
            return

    async def _attach(self, sandbox: Sandbox) -> None:
        answer = await self.runtime.launcher.call("attach", sandbox=sandbox.id)
        if self.table.get(sandbox.id) is not sandbox or sandbox.state is SandboxState.DELETING:
            close_fds(answer.take_fds())
            return
        self.runtime.connect(sandbox, answer)
        if sandbox.state is SandboxState.PAUSED:
            # It was noted before it was done, or undone before that was noted.
            await self.runtime.launcher.call("freeze", sandbox=sandbox.id, frozen=True)
        if sandbox.spec.idle_timeout_s is not None:
            # What runs in the background keeps it from being idle, so it has to be known.
            await self.runtime.processes.of(sandbox).rows()
