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
from sandboxd.client.results import Output, StreamExit
from sandboxd.client.retries import Resumes
from sandboxd.errors import ExecNotFound


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
        self._cut: ConnectionLost | None = None

    async def start(self) -> Self:
        """Send the command off; entering the context and iterating do so too. Raises where it
        cannot be started."""
        if self._pieces is None:
            try:
                self._pieces = await self._open(self._call)
            except ConnectionLost as error:
                self._pieces, self._cut = _nothing(), error
        return self

    async def _open(self, call: Call[None]) -> AsyncIterator[bytes]:
        return await self._connection.enter_async_context(self._driver.stream(call))

    @property
    def exec_id(self) -> str:
        """To come back to it with ``AsyncSandbox.resume_stream``, or to kill it by."""
        return self._frames.exec_id

    async def exit(self) -> StreamExit:
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
            cut, self._cut = self._cut, None
            try:
                assert self._pieces is not None
                async for piece in self._pieces:
                    resumes.progress(self._frames.next_seq)
                    for output in self._frames.feed(piece):
                        yield output
            except ConnectionLost as error:
                cut = error
            if not self._frames.ended:
                await self._take_up(resumes.after_cut(cut), cut)
        await self.close()
        if self._frames.error is not None:
            raise self._frames.error

    async def _take_up(self, pause_s: float, cut: ConnectionLost | None) -> None:
        await self.close()
        self._frames.cut()
        await asyncio.sleep(pause_s)
        call = calls.resume_stream(self._sandbox_id, self.exec_id, self._frames.next_seq)
        try:
            self._pieces = await self._open(call)
        except ExecNotFound:
            if self._frames.next_seq > 0:
                raise
            # Nobody knows whether it was begun.
            raise cut or ConnectionLost("the stream of the command was cut") from cut

    async def kill(self) -> None:
        """Kill the command with its whole tree, detached or not; a session's is interrupted. What
        is left of the output, and how it ended, can still be read. Idempotent."""
        await self._driver.do(calls.kill_exec(self._sandbox_id, self.exec_id))

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


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
