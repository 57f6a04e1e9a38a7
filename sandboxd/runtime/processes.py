"""Background processes: started, looked at, written to, signalled, removed.

What must outlive the daemon is the launcher's (``launcher/processes.py``); here is what this daemon
makes of it: spools it can read, a pipe it can write, and who waits for more. A table is asked for
at its first use, so a daemon that starts anew pays only for what is used.

Output never passes through the event loop: it is read from the spool when somebody asks.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sandboxd.config import Config
from sandboxd.errors import (
    CommandTooLong,
    NodeError,
    NotATerminal,
    ProcessEnded,
    ProcessNotFound,
    SandboxDead,
    SandboxdError,
    SandboxLost,
    SandboxNotFound,
    StdinBlocked,
    StdinClosed,
)
from sandboxd.init import protocol
from sandboxd.init.protocol import ExecFlag, Failure, KillScope
from sandboxd.launcher.client import LauncherClient
from sandboxd.launcher.spool import Piece, SpoolReader, close_all
from sandboxd.model import ExecRequest
from sandboxd.runtime.failures import NODE_LOST, death, exec_failure, exit_code, has_run
from sandboxd.runtime.ping import failure_of
from sandboxd.runtime.sandbox import Sandbox

SHOWN_COMMAND_BYTES: Final = 1024
"""Of a command, kept to be shown."""

_MET_FIRST: Final = (ProcessNotFound, SandboxNotFound, SandboxDead, SandboxLost)
"""What the launcher says of a process whose sandbox is gone, before the sandbox's end is known."""

STREAMS: Final = ("stdout", "stderr")
_WRITE_BYTES: Final = 1 << 20
_EOF: Final = b"\x04"
"""VEOF of a terminal in its initial state, termios(3)."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended; ``exit_code`` is None where it never ran or went with its sandbox."""

    at: float
    exit_code: int | None
    signal: int | None
    oom_killed: bool
    cpu_user_s: float
    cpu_system_s: float
    peak_memory_bytes: int
    failure: SandboxdError | None


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a process's stream, and where the stream stands."""

    piece: Piece
    total_bytes: int
    closed: bool


@dataclass(eq=False)
class Process:
    """One row of a sandbox's table."""

    id: str
    sandbox: Sandbox
    pid: int
    flags: int
    meta: dict[str, Any]
    started_at: float
    exit: ProcessExit | None = None
    attached: bool = False
    waits_end: bool = False
    """Whoever waits for output is answered with what there is: the daemon is about to end."""
    on_exit: Callable[[], None] | None = None
    """Told once ``exit`` is there."""
    on_failure: Callable[[SandboxdError], None] | None = None
    """Told once its sandbox has failed."""
    _spools: list[SpoolReader] = field(default_factory=list)
    _event_fd: int = -1
    _stdin: int = -1
    _waiters: set[asyncio.Future[None]] = field(default_factory=set)
    _stdin_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_tty(self) -> bool:
        return bool(self.flags & ExecFlag.EXEC_TTY)

    @property
    def has_stdin(self) -> bool:
        return bool(self.flags & (ExecFlag.EXEC_STDIN | ExecFlag.EXEC_TTY))

    # --- its output --------------------------------------------------------------------------

    def take(self, fds: list[int]) -> None:
        """Take over the descriptors of ``process-attach``: eventfd, spools, stdin."""
        outputs = 1 if self.flags & (ExecFlag.EXEC_MERGE_STDERR | ExecFlag.EXEC_TTY) else 2
        if len(fds) < 1 + outputs:
            protocol.close_fds(fds)
            raise NodeError("the launcher sent too few descriptors of a process")
        self._event_fd = fds[0]
        self._spools = [SpoolReader(fd) for fd in fds[1 : 1 + outputs]]
        rest = fds[1 + outputs :]
        if rest:
            self._stdin = rest[0]
            os.set_blocking(self._stdin, False)
        protocol.close_fds(rest[1:])
        self.attached = True

    def output(self, stream: str, offset: int, limit: int) -> Output | None:
        """From an absolute offset on; None for a stream that it does not have."""
        index = STREAMS.index(stream)
        if index >= len(self._spools):
            return None
        spool = self._spools[index]
        # In this order: what is closed after the read may have grown before it.
        closed = spool.closed
        piece = spool.read(offset, limit)
        return Output(piece, spool.written, closed)

    def has_more(self, offsets: dict[str, int]) -> bool:
        """Whether a stream has bytes past its offset."""
        spools = dict(zip(STREAMS, self._spools, strict=False))
        return any(name in spools and spools[name].written > at for name, at in offsets.items())

    async def wait(self, offsets: dict[str, int], wait_s: float) -> None:
        """Until there is output past an offset, or the process has ended, for ``wait_s`` at
        most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while self.exit is None and not self.has_more(offsets) and loop.time() < deadline:
            if self.waits_end:
                return
            waiter = loop.create_future()
            self._waiters.add(waiter)
            if len(self._waiters) == 1 and self._event_fd >= 0:
                loop.add_reader(self._event_fd, self._readable)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            except TimeoutError:
                return
            finally:
                self._waiters.discard(waiter)
                if not self._waiters and self._event_fd >= 0:
                    loop.remove_reader(self._event_fd)

    def _readable(self) -> None:
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def end_waits(self) -> None:
        self.waits_end = True
        self._wake()

    def ended(self, end: dict[str, Any]) -> None:
        """What the launcher says of its end."""
        if self.exit is None:
            self._end(_exit(end, user=str(self.meta.get("user")), cwd=str(self.meta.get("cwd"))))

    def _end(self, end: ProcessExit) -> None:
        self.exit = end
        self.sandbox.background -= 1
        self._wake()
        if self.on_exit is not None:
            self.on_exit()

    def sandbox_failed(self, error: SandboxdError) -> None:
        """Its own end is the launcher's to tell, but for a launcher that ended with the node."""
        if self.on_failure is not None:
            self.on_failure(error)
        if self.exit is None and error.detail.get("reason") == NODE_LOST:
            self._end(_exit({"at": time.time(), "lost": NODE_LOST, "oom": False}))

    @property
    def is_session(self) -> bool:
        return "session" in self.meta

    # --- its input ---------------------------------------------------------------------------

    async def write_stdin(self, data: bytes, timeout_s: float) -> None:
        """Returns once the pipe, or the terminal, has taken all of it.

        Raises StdinClosed, StdinBlocked with what was taken in time, and the failure of a sandbox
        that has taken the process along.
        """
        loop = asyncio.get_running_loop()
        async with self._stdin_lock:
            rest = memoryview(data)
            deadline = loop.time() + timeout_s
            while rest:
                if self._stdin < 0:
                    raise StdinClosed("the process has no open stdin")
                try:
                    rest = rest[os.write(self._stdin, rest[:_WRITE_BYTES]) :]
                except BlockingIOError:
                    try:
                        async with asyncio.timeout_at(deadline):
                            await self._writable(loop)
                    except TimeoutError:
                        raise StdinBlocked(
                            f"the process did not read its stdin for {timeout_s:g} s",
                            written_bytes=len(data) - len(rest),
                        ) from None
                except OSError as error:
                    gone = await failure_of(self.sandbox)
                    if gone is not None:
                        raise gone.with_traceback(None) from None
                    raise StdinClosed(
                        "nobody reads the process's stdin any more",
                        written_bytes=len(data) - len(rest),
                        errno=errno.errorcode.get(error.errno or 0, ""),
                    ) from None

    async def _writable(self, loop: asyncio.AbstractEventLoop) -> None:
        ready: asyncio.Future[None] = loop.create_future()

        def take() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_writer(self._stdin, take)
        try:
            await ready
        finally:
            if self._stdin >= 0:
                loop.remove_writer(self._stdin)

    async def send_eof(self, timeout_s: float) -> bool:
        """End its input; True where our copies of the pipe are to be closed for that."""
        if self.is_tty:
            await self.write_stdin(_EOF, timeout_s)
            return False
        async with self._stdin_lock:
            self._close_stdin()
        return True

    def resize(self, cols: int, rows: int) -> None:
        """Set its terminal's size, which sends SIGWINCH. Raises NotATerminal."""
        if not self.is_tty or self._stdin < 0:
            raise NotATerminal("the process has no terminal")
        fcntl.ioctl(self._stdin, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            asyncio.get_running_loop().remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def release(self) -> None:
        """Close everything of it here; what the launcher has stays."""
        self._close_stdin()
        close_all(*self._spools)
        self._spools = []
        if self._event_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._event_fd)
            os.close(self._event_fd)
            self._event_fd = -1
        self.attached = False
        self._wake()


class ProcessTable:
    """The background processes of one sandbox."""

    def __init__(
        self, sandbox: Sandbox, launcher: LauncherClient, config: Config, new_id: Callable[[], str]
    ) -> None:
        self._sandbox = sandbox
        self._launcher = launcher
        self.config = config
        self._new_id = new_id
        self._processes: dict[str, Process] = {}
        self._starting: dict[str, dict[str, Any] | None] = {}
        self._known = False
        self._asking = asyncio.Lock()
        sandbox.on_failure = self.sandbox_failed

    async def start(self, request: ExecRequest, *, name: str = "") -> Process:
        """Start a command in the background; its timeout and output caps do not count.

        Raises what a command that cannot be started raises, and TooManyProcesses.
        """
        process, fds = await self.launch(
            request,
            process_id=self._new_id(),
            capacity=self.config.process_spool_bytes,
            meta={"name": name},
        )
        process.take(fds)
        return process

    async def launch(
        self,
        request: ExecRequest,
        *,
        process_id: str,
        capacity: int,
        meta: dict[str, Any],
        flags: int = 0,
    ) -> tuple[Process, list[int]]:
        """Start one; its descriptors are the caller's: with ``capacity`` 0 the pipes themselves."""
        sandbox = self._sandbox
        sandbox.control_to_start()
        command = sandbox.pack_command(request)
        if len(command.payload) > protocol.PAYLOAD_MAX:
            raise CommandTooLong(
                f"arguments and environment have {len(command.payload)} bytes,"
                f" {protocol.PAYLOAD_MAX} is the most"
            )
        meta = {
            "command": _shown(request.command),
            "user": command.user,
            "cwd": command.cwd,
            **meta,
        }
        memfd = os.memfd_create("command", os.MFD_CLOEXEC)
        self._starting[process_id] = None
        try:
            _write_all(memfd, command.payload)
            answer = await self._launcher.call(
                "process-start",
                fds=(memfd,),
                sandbox=sandbox.id,
                process=process_id,
                meta=meta,
                flags=int(command.flags | flags),
                capacity=capacity,
                most=self.config.max_processes,
            )
        except BaseException as error:
            # It may have been started all the same.
            self._known = False
            if isinstance(error, _MET_FIRST):
                await self._check_lives()
            raise
        finally:
            os.close(memfd)
            early_end = self._starting.pop(process_id)
        if "failure" in answer.ok:
            protocol.close_fds(answer.fds)
            raise exec_failure(Failure(*answer.ok["failure"]), user=command.user, cwd=command.cwd)
        process = self._add(answer.ok)
        if early_end is not None:
            process.ended(early_end)
        return process, answer.fds

    async def find(self, process_id: str, *, attach: bool = True) -> Process:
        """One, and by default one that can be read and written. Raises ProcessNotFound, NodeError
        where its output is lost."""
        await self._know()
        process = self._processes.get(process_id)
        if process is None or process.is_session:
            raise ProcessNotFound(f"no process {process_id!r} in this sandbox")
        if attach and not process.attached:
            async with self._asking:
                if not process.attached:
                    process.take(await self.descriptors(process))
        return process

    async def descriptors(self, process: Process) -> list[int]:
        """Those of ``launch`` again."""
        return await self._call("process-attach", process)

    async def all(self) -> list[Process]:
        """In the order in which they were started."""
        return [one for one in await self.rows() if not one.is_session]

    async def rows(self) -> list[Process]:
        """Sessions too."""
        await self._know()
        return sorted(self._processes.values(), key=lambda one: (one.started_at, one.id))

    async def signal(self, process: Process, number: int, scope: KillScope) -> None:
        """Raises ProcessEnded where the main process is asked for and has ended."""
        if process.exit is not None and scope is KillScope.KILL_MAIN:
            raise ProcessEnded(f"process {process.id} has ended")
        await self._call("process-signal", process, signal=number, scope=int(scope))

    async def end_stdin(self, process: Process, timeout_s: float) -> None:
        """Raises StdinClosed where it has none."""
        if not process.has_stdin:
            raise StdinClosed("the process was started without a stdin")
        if await process.send_eof(timeout_s):
            await self._call("process-close-stdin", process)

    async def remove(self, process: Process) -> None:
        """None of its tree lives when this returns, and its output is gone."""
        await self._call("process-remove", process)
        if self._processes.pop(process.id, None) is not None and process.exit is None:
            self._sandbox.background -= 1
        process.release()

    async def _call(self, verb: str, process: Process, **fields: Any) -> list[int]:
        try:
            answer = await self._launcher.call(
                verb, sandbox=self._sandbox.id, process=process.id, **fields
            )
        except _MET_FIRST:
            await self._check_lives()
            raise
        return answer.fds

    async def _check_lives(self) -> None:
        """Raises the sandbox's failure where it has one."""
        gone = await failure_of(self._sandbox)
        if gone is not None:
            raise gone.with_traceback(None) from None

    async def _know(self) -> None:
        """Ask the launcher for all it has, once, and again after it was lost."""
        async with self._asking:
            if self._known:
                return
            after = ""
            while True:
                answer = await self._launcher.call(
                    "process-list", sandbox=self._sandbox.id, after=after
                )
                rows = answer.ok["processes"]
                for row in rows:
                    self._add(row)
                if not answer.ok["more"] or not rows:
                    break
                after = str(rows[-1]["process"])
            self._known = True

    def _add(self, row: dict[str, Any]) -> Process:
        process_id = str(row["process"])
        process = self._processes.get(process_id)
        if process is None:
            process = Process(
                id=process_id,
                sandbox=self._sandbox,
                pid=int(row["pid"]),
                flags=int(row["flags"]),
                meta=dict(row["meta"]),
                started_at=float(row["started_at"]),
            )
            self._processes[process_id] = process
            self._sandbox.background += 1
        if row["exit"] is not None:
            process.ended(row["exit"])
        return process

    def told(self, event: dict[str, Any]) -> None:
        """The launcher's ``process-exited``."""
        process_id = str(event.get("process"))
        if process_id in self._starting:
            # Its end overtakes its start, whose waiter has not been resumed yet.
            self._starting[process_id] = event["exit"]
        elif process_id in self._processes:
            self._processes[process_id].ended(event["exit"])

    def sandbox_failed(self, error: SandboxdError) -> None:
        """End what waits for something in it, and the processes themselves where nobody else will
        ever tell of their ends."""
        for process in list(self._processes.values()):
            process.sandbox_failed(error)

    def end_waits(self) -> None:
        for process in self._processes.values():
            process.end_waits()

    def forget_answers(self) -> None:
        """The launcher was lost: what it told since is unknown."""
        self._known = False

    def close(self) -> None:
        for process in self._processes.values():
            process.release()
        self._processes.clear()


class ProcessTables:
    """The tables of all sandboxes, each made when it is first asked for."""

    def __init__(self, launcher: LauncherClient, config: Config, new_id: Callable[[], str]) -> None:
        self._launcher = launcher
        self._config = config
        self._new_id = new_id
        self._tables: dict[str, ProcessTable] = {}

    def of(self, sandbox: Sandbox) -> ProcessTable:
        table = self._tables.get(sandbox.id)
        if table is None:
            table = ProcessTable(sandbox, self._launcher, self._config, self._new_id)
            self._tables[sandbox.id] = table
        return table

    def reconfigure(self, config: Config) -> None:
        self._config = config
        for table in self._tables.values():
            table.config = config

    def told(self, event: dict[str, Any]) -> None:
        table = self._tables.get(str(event.get("sandbox")))
        if table is not None:
            table.told(event)

    def end_waits(self) -> None:
        """Answer whoever waits for output with what there is."""
        for table in self._tables.values():
            table.end_waits()

    def node_lost(self, sandbox: Sandbox) -> None:
        """No launcher knows this sandbox any more."""
        table = self._tables.get(sandbox.id)
        if table is not None:
            table.sandbox_failed(death(NODE_LOST))

    def launcher_lost(self) -> None:
        for table in self._tables.values():
            table.forget_answers()

    def forget(self, sandbox_id: str) -> None:
        """The sandbox is gone, and all that ran in it."""
        table = self._tables.pop(sandbox_id, None)
        if table is not None:
            table.close()

    def close(self) -> None:
        for sandbox_id in list(self._tables):
            self.forget(sandbox_id)


def _exit(end: dict[str, Any], *, user: str = "", cwd: str = "") -> ProcessExit:
    at = float(end["at"])
    if "lost" in end:
        # It went with its sandbox: whose fault that was is the sandbox's to say.
        gone = death(str(end["lost"]))
        return ProcessExit(at, None, None, bool(end["oom"]), 0.0, 0.0, 0, gone)
    failed = Failure(*end["failure"])
    code, number = exit_code(int(end["status"]))
    ran = has_run(failed)
    return ProcessExit(
        at=at,
        exit_code=code if ran else None,
        signal=number if ran else None,
        oom_killed=bool(end["oom"]) and number == signal.SIGKILL,
        cpu_user_s=int(end["user_us"]) / 1e6,
        cpu_system_s=int(end["system_us"]) / 1e6,
        peak_memory_bytes=int(end["maxrss_kb"]) * 1024,
        failure=None if ran else exec_failure(failed, user=user, cwd=cwd),
    )


def _shown(command: tuple[str, ...] | str) -> list[str] | str:
    """A command as far as it is kept to be shown."""
    if isinstance(command, str):
        return _cut(command, SHOWN_COMMAND_BYTES)
    words: list[str] = []
    left = SHOWN_COMMAND_BYTES
    for word in command:
        if left <= 0:
            words.append("…")
            break
        words.append(_cut(word, left))
        left -= len(word.encode()) + 1
    return words


def _cut(text: str, most: int) -> str:
    data = text.encode()
    return text if len(data) <= most else data[:most].decode("utf-8", "ignore") + "…"


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
