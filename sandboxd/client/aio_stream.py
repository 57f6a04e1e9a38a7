"""A command's output while it runs, in asyncio; taken up again where its connection is cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from sandboxd.client import calls
from sandboxd.client.aio_driver import AsyncDriver
from sandboxd.client.calls import Call
from sandboxd.client.failures import ConnectionLost
from sandboxd.client.frames import FrameReader
from sandboxd.client.results import ExecExit, Output
from sandboxd.client.retries import Resumes


class AsyncExecStream:
    """Iterate over the output; ``exit()`` says how the command ended, once that is over.

    A context manager: leaving it early closes the connection, and the node kills the command soon
    after unless it was detached.
    """

    def __init__(
        self, driver: AsyncDriver, sandbox_id: str, call: Call[None], frames: FrameReader
    ) -> None:
        self._driver = driver
        self._sandbox_id = sandbox_id
        self._frames = frames
        self._connection = contextlib.AsyncExitStack()
        self._call = call
        self._pieces: AsyncIterator[bytes] | None = None

    async def start(self) -> Self:
        """Send the command off; entering the context and iterating do so too. Raises where it
        cannot be started."""
        if self._pieces is None:
            self._pieces = await self._open(self._call)
        return self

    async def _open(self, call: Call[None]) -> AsyncIterator[bytes]:
        return await self._connection.enter_async_context(self._driver.stream(call))

    @property
    def exec_id(self) -> str | None:
        """To come back to it with ``AsyncSandbox.resume_stream``; None until its first frame."""
        return self._frames.exec_id

    async def exit(self) -> ExecExit:
        """How it ended. Reads what is left of the output, and throws that away."""
        async for _ in self:
            pass
        assert self._frames.exit is not None
        return self._frames.exit

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Raises the command's SandboxdError where there is no result."""
        await self.start()
        resumes = Resumes()
        while not self._frames.ended:
            try:
                assert self._pieces is not None
                async for piece in self._pieces:
                    resumes.progress(self._frames.next_seq)
                    for output in self._frames.feed(piece):
                        yield output
            except ConnectionLost as error:
                cut: ConnectionLost | None = error
            else:
                cut = None
            if not self._frames.ended:
                await self._take_up(resumes.after_cut(self.exec_id, cut))
        await self.close()
        if self._frames.error is not None:
            raise self._frames.error

    async def _take_up(self, pause_s: float) -> None:
        await self.close()
        self._frames.cut()
        await asyncio.sleep(pause_s)
        assert self.exec_id is not None
        call = calls.resume_stream(self._sandbox_id, self.exec_id, self._frames.next_seq)
        self._pieces = await self._open(call)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
