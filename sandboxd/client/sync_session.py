"""A session of a sandbox, blocking: a shell (or Python) whose state lasts between commands."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

from sandboxd.client import calls, session_calls
from sandboxd.client.frames import FrameReader
from sandboxd.client.session_calls import SessionExecOptions, SessionInfo, SessionResult
from sandboxd.client.sync_driver import Driver
from sandboxd.client.sync_stream import ExecStream
from sandboxd.errors import SandboxdError


class Session:
    """Made by ``Sandbox.open_session`` or ``session``. A context manager, which closes it."""

    def __init__(self, driver: Driver, sandbox_id: str, info: SessionInfo) -> None:
        self._driver = driver
        self._sandbox_id = sandbox_id
        self.info = info
        """What was last known of it; ``refresh`` asks again."""

    @property
    def id(self) -> str:
        return self.info.id

    def refresh(self) -> SessionInfo:
        self.info = self._driver.do(session_calls.get(self._sandbox_id, self.id))
        return self.info

    def exec(self, command: str, **options: Unpack[SessionExecOptions]) -> SessionResult:
        """Run a command, one at a time: directory, variables and functions last. Raises SessionBusy
        and SessionEnded."""
        call = session_calls.execute(self._sandbox_id, self.id, command, options)
        return self._driver.do(call)

    def exec_stream(self, command: str, **options: Unpack[SessionExecOptions]) -> ExecStream:
        """The same, its output told as it comes: whole, whatever ``max_output_bytes`` says. A
        stream that is cut is taken up again."""
        exec_id = calls.new_exec_id()
        call = session_calls.execute_stream(self._sandbox_id, self.id, command, options, exec_id)
        return ExecStream(self._driver, self._sandbox_id, call, FrameReader(exec_id))

    def interrupt(self) -> bool:
        """End the command that runs, as Ctrl-C does; False where none did."""
        return self._driver.do(session_calls.interrupt(self._sandbox_id, self.id))

    def resize(self, cols: int, rows: int) -> None:
        """How wide and high the lines of later commands are (``COLUMNS`` and ``LINES``)."""
        self._driver.do(session_calls.resize(self._sandbox_id, self.id, cols, rows))

    def close(self) -> None:
        """End it with all that it has started. When it returns, none of it lives."""
        self._driver.do(session_calls.close(self._sandbox_id, self.id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SandboxdError:
            if error is None:
                raise
