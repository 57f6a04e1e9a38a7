"""A run of this controller's, in asyncio: kept alive by a task for as long as its block lasts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from sandboxd.client import run_calls
from sandboxd.client.calls import CreateOptions
from sandboxd.client.run_calls import RunEnd, RunInfo, RunOptions
from sandboxd.errors import RunEnded, RunNotFound, SandboxdError

if TYPE_CHECKING:
    from sandboxd.client.aio import AsyncClient, Pending

log = logging.getLogger(__name__)


class AsyncRun:
    """Sandboxes that end together: with this block, or ``lease_s`` after this process has died.

    An event loop that is kept busy for longer than the lease cannot renew it.
    """

    def __init__(
        self, client: AsyncClient, name: str | None, lease_s: float, options: RunOptions
    ) -> None:
        self._client = client
        self.name = name or run_calls.new_name()
        self._lease_s = lease_s
        self._options = options
        self._task: asyncio.Task[None] | None = None
        self.lost: SandboxdError | None = None
        """Why the node has ended the run, if it has; creates are refused then (``run-ended``)."""

    async def __aenter__(self) -> Self:
        await self._client.do(run_calls.put(self.name, self._lease_s, self._options))
        self._task = asyncio.get_running_loop().create_task(self._beat())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        try:
            await self.end()
        except SandboxdError:
            if error is None:  # the first error is the one to tell of; the lease ends the run
                raise

    def create(self, image: str, **options: Unpack[CreateOptions]) -> Pending:
        """A sandbox of this run."""
        options["run"] = self.name
        return self._client.create(image, **options)

    async def refresh(self) -> RunInfo:
        """Ask about it."""
        return await self._client.do(run_calls.get(self.name))

    async def end(self, within_s: float = 60.0) -> RunEnd:
        """End everything of it, now. Idempotent."""
        return await self._client.do(run_calls.end(self.name, within_s))

    async def _beat(self) -> None:
        heard = True
        while True:
            await asyncio.sleep(run_calls.next_beat_s(self._lease_s, heard=heard))
            try:
                heard = await self._beat_once()
            except RunEnded as error:
                self.lost = error
                return

    async def _beat_once(self) -> bool:
        try:
            try:
                await self._client.do(run_calls.heartbeat(self.name, self._lease_s))
            except RunNotFound:
                # The node has begun anew and knows nothing: neither of the run nor its sandboxes.
                await self._client.do(run_calls.put(self.name, self._lease_s, self._options))
        except RunEnded:
            raise
        except SandboxdError as error:
            log.warning("run %s: no heartbeat: %s", self.name, error.message)
            return False
        return True
