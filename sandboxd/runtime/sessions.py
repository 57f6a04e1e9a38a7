"""The sessions of each sandbox: opened, found again by a daemon that starts anew, used, closed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress

from sandboxd.errors import (
    NodeUnavailable,
    SandboxDead,
    SandboxdError,
    SessionEnded,
    SessionNotFound,
)
from sandboxd.init.protocol import ExecFlag, KillScope, close_fds
from sandboxd.model import ExecRequest
from sandboxd.runtime import shells
from sandboxd.runtime.exec import Sink
from sandboxd.runtime.ping import failure_of
from sandboxd.runtime.processes import Process, ProcessTable, ProcessTables
from sandboxd.runtime.sandbox import Sandbox
from sandboxd.runtime.session import GivenStdin, Session, SessionCommand, new_nonce
from sandboxd.runtime.shells import SessionKind

_PIPES = 4


class SessionTable:
    """The sessions of one sandbox, over its background processes."""

    def __init__(
        self, sandbox: Sandbox, processes: ProcessTable, new_id: Callable[[], str]
    ) -> None:
        self._sandbox = sandbox
        self._processes = processes
        self._new_id = new_id
        self._sessions: dict[str, Session] = {}
        self._attaching = asyncio.Lock()
        self._signals: set[asyncio.Task[None]] = set()

    async def open(
        self, kind: SessionKind, *, cwd: str | None, env: dict[str, str], user: str | None
    ) -> Session:
        """A new one, ready for its first command.

        Raises what a command that cannot be started raises; SessionEnded where the sandbox has no
        such interpreter.
        """
        nonce = new_nonce()
        command: tuple[str, ...] | str = shells.START_SHELL
        if kind is SessionKind.PYTHON:
            command = ("python3", "-u", "-c", shells.START_PYTHON, nonce)
        request = ExecRequest(command=command, cwd=cwd, env=env, user=user, stdin=b"")
        process, fds = await self._processes.launch(
            request,
            process_id=self._new_id(),
            capacity=0,
            meta={"session": str(kind), "command": ""},
            flags=ExecFlag.EXEC_STATUS,
        )
        session = self._add(process, fds)
        try:
            await session.greet(nonce, shells.hello(nonce) if kind is SessionKind.SHELL else b"")
        except BaseException as error:
            end = process.exit
            with suppress(SandboxdError):  # it may be gone with its sandbox
                await asyncio.shield(self.close(process.id))
            if isinstance(error, SandboxdError):
                gone = await failure_of(self._sandbox)
                if gone is not None:
                    raise gone.with_traceback(None) from None
            if isinstance(error, SessionEnded) and end is not None and end.failure is not None:
                raise end.failure from None
            raise
        return session

    def _add(self, process: Process, fds: list[int]) -> Session:
        if len(fds) != _PIPES:
            close_fds(fds)
            raise NodeUnavailable("the launcher sent too few descriptors of a session")
        session = Session(process, fds, lambda number, scope: self._signal(process, number, scope))
        self._sessions[process.id] = session
        return session

    def _signal(self, process: Process, number: int, scope: KillScope) -> None:
        async def send() -> None:
            with suppress(SandboxdError):
                await self._processes.signal(process, number, scope)

        task = asyncio.get_running_loop().create_task(send())
        self._signals.add(task)
        task.add_done_callback(self._signals.discard)

    async def all(self) -> list[Process]:
        """Their processes, in the order in which they were opened."""
        return [one for one in await self._processes.rows() if one.is_session]

    def is_busy(self, session_id: str) -> bool:
        session = self._sessions.get(session_id)
        return session is not None and session.busy

    async def find(self, session_id: str) -> Session:
        """Raises SessionNotFound.

        One that another daemon opened is interrupted first: whoever waited for its command is gone.
        """
        async with self._attaching:
            session = self._sessions.get(session_id)
            if session is not None:
                return session
            process = await self.look_up(session_id)
            session = self._add(process, await self._processes.descriptors(process))
            if not session.ended:
                kind = SessionKind(process.meta["session"])
                if kind is SessionKind.PYTHON:
                    session.dialect = shells.Dialect.PYTHON
                await self._processes.signal(process, signal.SIGINT, KillScope.KILL_TREE)
                await self._make_sure(session)
            return session

    async def _make_sure(self, session: Session) -> None:
        nonce = new_nonce()
        kind = SessionKind(session.process.meta["session"])
        await session.greet(nonce, shells.hello_again(nonce, kind))

    async def start(
        self,
        session: Session,
        command: str,
        *,
        stdin: bytes | None,
        timeout_s: float,
        sinks: tuple[Sink, Sink],
    ) -> SessionCommand:
        """Send a command off. Raises SessionBusy, SessionEnded, SandboxPaused, SandboxExclusive."""
        self._sandbox.control_to_start()
        session.check_free()
        if session.unsure:
            # An interrupt that is still on its way would hit the command that comes now.
            if self._signals:
                await asyncio.wait(self._signals)
            await self._make_sure(session)
        if stdin is None:
            return session.start(command, timeout_s=timeout_s, sinks=sinks)
        given = GivenStdin(self._sandbox, stdin, str(session.process.meta["user"]))
        try:
            running = session.start(
                command, timeout_s=timeout_s, sinks=sinks, stdin_path=await given.path()
            )
        except BaseException:
            given.close()
            raise
        running.done.add_done_callback(lambda _: given.close())
        return running

    async def look_up(self, session_id: str) -> Process:
        """Its record alone. Raises SessionNotFound."""
        for process in await self.all():
            if process.id == session_id:
                return process
        raise SessionNotFound(f"no session {session_id!r} in this sandbox")

    async def close(self, session_id: str) -> None:
        """End it with all that it has started. Raises SessionNotFound."""
        await self._processes.remove(await self.look_up(session_id))
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.release(SessionEnded("the session was closed"))

    def release(self, error: SandboxdError) -> None:
        for session in self._sessions.values():
            session.release(error)
        self._sessions.clear()


class SessionTables:
    """The tables of all sandboxes, each made when it is first asked for."""

    def __init__(self, processes: ProcessTables, new_id: Callable[[], str]) -> None:
        self._processes = processes
        self._new_id = new_id
        self._tables: dict[str, SessionTable] = {}

    def of(self, sandbox: Sandbox) -> SessionTable:
        table = self._tables.get(sandbox.id)
        if table is None:
            table = SessionTable(sandbox, self._processes.of(sandbox), self._new_id)
            self._tables[sandbox.id] = table
        return table

    def forget(self, sandbox_id: str) -> None:
        table = self._tables.pop(sandbox_id, None)
        if table is not None:
            table.release(SandboxDead("the sandbox was deleted", reason="deleted"))

    def close(self) -> None:
        for sandbox_id in list(self._tables):
            self._tables.pop(sandbox_id).release(NodeUnavailable("the daemon is stopping"))
