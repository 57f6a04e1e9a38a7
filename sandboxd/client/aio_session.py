"""A session of a sandbox, in asyncio: a shell (or Python) whose state lasts between commands."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

from sandboxd.client import calls, session_calls
from sandboxd.client.aio_driver import AsyncDriver
from sandboxd.client.aio_stream import AsyncExecStream
from sandboxd.client.frames import FrameReader
from sandboxd.client.session_calls import SessionExecOptions, SessionInfo, SessionResult
from sandboxd.errors import SandboxdError


class AsyncSession:
    """Made by ``AsyncSandbox.open_session`` or ``session``. A context manager, which closes it."""

    def __init__(self, driver: AsyncDriver, sandbox_id: str, info: SessionInfo) -> None:
        self._driver = driver
        self._sandbox_id = sandbox_id
        self.info = info
        """What was last known of it; ``refresh`` asks again."""

    @property
    def id(self) -> str:
        return self.info.id

    async def refresh(self) -> SessionInfo:
        self.info = await self._driver.do(session_calls.get(self._sandbox_id, self.id))
        return self.info

    async def exec(self, command: str, **options: Unpack[SessionExecOptions]) -> SessionResult:
        """Run a command, one at a time: directory, variables and functions last. Raises SessionBusy
        and SessionEnded."""
        call = session_calls.execute(self._sandbox_id, self.id, command, options)
        return await self._driver.do(call)

    def exec_stream(self, command: str, **options: Unpack[SessionExecOptions]) -> AsyncExecStream:
        """The same, its output told as it comes: whole, whatever ``max_output_bytes`` says. A
        stream that is cut is taken up again."""
        exec_id = calls.new_exec_id()
        call = session_calls.execute_stream(self._sandbox_id, self.id, command, options, exec_id)
        return AsyncExecStream(self._driver, self._sandbox_id, call, FrameReader(exec_id))

    async def interrupt(self) -> bool:
        """End the command that runs, as Ctrl-C does; False where none did."""
        return await self._driver.do(session_calls.interrupt(self._sandbox_id, self.id))

    async def resize(self, cols: int, rows: int) -> None:
        """How wide and high the lines of later commands are (``COLUMNS`` and ``LINES``)."""
        await self._driver.do(session_calls.resize(self._sandbox_id, self.id, cols, rows))

    async def close(self) -> None:
        """End it with all that it has started. When it returns, none of it lives."""
        await self._driver.do(session_calls.close(self._sandbox_id, self.id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except SandboxdError:
            if error is None:
                raise
