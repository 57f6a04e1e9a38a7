"""A background process of a sandbox, in asyncio. It outlives this client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from sandboxd.client import process_calls
from sandboxd.client.aio_driver import AsyncDriver
from sandboxd.client.process_calls import PIECE_BYTES, WAIT_S, Follow, ProcessInfo, ProcessNews
from sandboxd.client.results import Output


class AsyncProcess:
    """Made by ``AsyncSandbox.start_process`` or ``process``. Its id is valid until it is removed,
    also after a restart of the daemon."""

    def __init__(self, driver: AsyncDriver, sandbox_id: str, info: ProcessInfo) -> None:
        self._driver = driver
        self._sandbox_id = sandbox_id
        self.info = info
        """What was last known of it; ``refresh`` asks again."""

    @property
    def id(self) -> str:
        return self.info.id

    async def refresh(self) -> ProcessInfo:
        """Ask about it."""
        return (await self.read({})).info

    async def wait(self, timeout_s: float | None = None) -> ProcessInfo:
        """Wait for its end. Raises TimeoutError, and leaves it running."""
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while self.info.running:
            left_s = WAIT_S if deadline is None else deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise TimeoutError(f"process {self.id} runs on after {timeout_s} s")
            await self.read({}, wait_s=min(left_s, WAIT_S))
        return self.info

    async def read(
        self,
        offsets: Mapping[str, int],
        *,
        wait_s: float = 0.0,
        max_bytes: int = PIECE_BYTES,
    ) -> ProcessNews:
        """Its state, and its output from these offsets (``stdout``, ``stderr``); with ``wait_s``
        once there is some, or it has ended, or the time is up."""
        call = process_calls.news(
            self._sandbox_id, self.id, wait_s=wait_s, offsets=offsets, max_bytes=max_bytes
        )
        told = await self._driver.do(call)
        self.info = told.info
        return told

    async def output(self, offsets: Mapping[str, int] | None = None) -> AsyncIterator[Output]:
        """Its output as it comes, from its beginning or these offsets, until it has ended."""
        follow = Follow(self._sandbox_id, self.id, offsets)
        while not follow.ended:
            told = await self._driver.do(follow.call())
            self.info = told.info
            for output in follow.take(told):
                yield output

    async def write(self, data: str | bytes, *, eof: bool = False, timeout_s: float = 30.0) -> int:
        """Write to its stdin; returns once its pipe has taken all. ``eof`` closes it then."""
        raw = data.encode() if isinstance(data, str) else data
        return await self._driver.do(
            process_calls.write(self._sandbox_id, self.id, raw, eof, timeout_s)
        )

    async def close_stdin(self) -> None:
        await self._driver.do(process_calls.close_stdin(self._sandbox_id, self.id))

    async def signal(self, number: int | str = "TERM", *, tree: bool = False) -> None:
        """A number, or a name such as ``INT``; to it alone or to all that it has started."""
        await self._driver.do(process_calls.send_signal(self._sandbox_id, self.id, number, tree))

    async def resize(self, cols: int, rows: int) -> None:
        """Of its terminal. Raises NotATerminal."""
        await self._driver.do(process_calls.resize(self._sandbox_id, self.id, cols, rows))

    async def remove(self) -> None:
        """Kill its whole tree and forget it with its output. When it returns, none of it lives."""
        await self._driver.do(process_calls.remove(self._sandbox_id, self.id))
