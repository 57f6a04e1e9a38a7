"""The table of background processes: what was started, and how it ended.

A process outlives the daemon that asked for it, so what a daemon needs to go on is here: its id,
the daemon's own record of it, its end, and (in the spooler, for ``spool``) its output. Without a
spool the launcher keeps a copy of each pipe and gives those out: nothing is lost between two
daemons, as what is not read stays in the pipe.

The command itself (arguments, environment) comes in a memfd that is handed on to PID 1 unread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from sandboxd.errors import (
    NodeError,
    ProcessExists,
    ProcessNotFound,
    SandboxDead,
    SandboxExclusive,
    SandboxLost,
    TooManyProcesses,
)
from sandboxd.init import protocol as wire
from sandboxd.init.protocol import ExecFlag, KillScope, MsgType
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.sandboxes import Sandbox
from sandboxd.launcher.worker import Worker
from sandboxd.model import SandboxState

START_TIMEOUT_S: Final = 20.0
SPOOL_TIMEOUT_S: Final = 10.0
GONE_TIMEOUT_S: Final = 30.0
DELIVERY_TIMEOUT_S: Final = 20.0
LIST_PAGE: Final = 8
"""Each row may carry META_MAX of the daemon's; a page must fit a message."""
META_MAX: Final = 4096


@dataclass(slots=True)
class Process:
    id: str
    sandbox: Sandbox
    meta: dict[str, Any]
    flags: int
    spooled: bool
    started_at: float
    number: int = 0
    """Of its exec, at PID 1."""
    pid: int = 0
    cgroup: int = 0
    """The number of its cgroup."""
    fds: list[int] = field(default_factory=list)
    """With a spool: stdin, or the terminal's master; without: every pipe, in R_STARTED's order."""
    exit: dict[str, Any] | None = None
    started: Promise[wire.Message] = field(default_factory=Promise)
    connected: Promise[None] = field(default_factory=Promise)
    """Settled when its output has somewhere to go."""
    gone: Promise[None] | None = None
    """Settled when none of its tree lives; there once that was asked for."""
    oom_kills: int = 0

    @property
    def is_tty(self) -> bool:
        return bool(self.flags & ExecFlag.EXEC_TTY)

    @property
    def key(self) -> str:
        """Its name at the spooler."""
        return f"{self.sandbox.id}/{self.id}"

    def row(self) -> dict[str, Any]:
        return {
            "process": self.id,
            "pid": self.pid,
            "flags": self.flags,
            "spool": self.spooled,
            "meta": self.meta,
            "started_at": self.started_at,
            "exit": self.exit,
        }


class Processes:
    def __init__(self, loop: Loop, spooler: Worker, on_exit: Callable[[Process], None]) -> None:
        self._loop = loop
        self._spooler = spooler
        self._on_exit = on_exit
        self._table: dict[str, dict[str, Process]] = {}

    def find(self, message: dict[str, Any]) -> Process:
        """Raises ProcessNotFound."""
        process = self._table.get(message["sandbox"], {}).get(message["process"])
        if process is None:
            raise ProcessNotFound(f"no process {message['process']!r} in this sandbox")
        return process

    def start(
        self, sandbox: Sandbox, message: dict[str, Any], payload_fd: int
    ) -> Task[tuple[dict[str, Any], tuple[int, ...]]]:
        """Start one; its row and the descriptors of ``attach``, or the step it failed at.

        Raises ProcessExists, TooManyProcesses, SandboxLost, SandboxDead, NodeError.
        """
        mine = self._table.setdefault(sandbox.id, {})
        if sandbox.slot is None or sandbox.state is not SandboxState.RUNNING:
            raise SandboxLost("the sandbox is dead", reason=sandbox.reason)
        if sandbox.exclusive:
            raise SandboxExclusive("an exclusive command has the sandbox to itself")
        if message["process"] in mine:
            raise ProcessExists(f"there is a process {message['process']!r}")
        if len(mine) >= int(message["most"]):
            raise TooManyProcesses(
                f"the sandbox has its {len(mine)} processes", hint="remove those that have ended"
            )
        process = Process(
            message["process"],
            sandbox,
            message["meta"],
            int(message["flags"]),
            int(message["capacity"]) > 0,
            time.time(),
        )
        with suppress(OSError):
            process.oom_kills = sandbox.slot.cgroups.oom_kills()
        mine[process.id] = process
        try:
            process.number = sandbox.slot.pid1.start(
                process.flags, payload_fd, lambda answer, fds: self._answered(process, answer, fds)
            )
            first = yield from self._loop.wait(process.started, START_TIMEOUT_S, "starting it")
            if first.type == MsgType.R_FAILED:
                failure = wire.unpack_failure(first.payload)
                self._drop(process)
                return {"failure": [failure.step, failure.index, failure.err]}, ()
            process.pid, process.cgroup = wire.unpack_started(first.payload)
            fds = yield from self._connect(process, int(message["capacity"]))
        except BaseException as error:
            self._loop.spawn(self.remove(process))
            if isinstance(error, BrokenPipeError):
                raise SandboxDead("the sandbox's PID 1 is gone") from error
            if isinstance(error, OSError | TimeoutError | wire.ProtocolError):
                raise NodeError(f"the process could not be started: {error}") from error
            raise
        return process.row(), fds

    def _connect(self, process: Process, capacity: int) -> Task[tuple[int, ...]]:
        """Give its output to the spooler; returns the descriptors for the daemon."""
        if not process.spooled:
            process.connected.resolve(None)
            return tuple(os.dup(fd) for fd in process.fds)
        outputs = 1 if process.flags & (ExecFlag.EXEC_MERGE_STDERR | ExecFlag.EXEC_TTY) else 2
        if len(process.fds) < outputs:
            raise wire.ProtocolError("a process without its pipes")
        output, process.fds = process.fds[:outputs], process.fds[outputs:]
        if process.is_tty:
            process.fds = [os.dup(output[0])]
        try:
            opened = self._spooler.request(
                "open", tuple(output), process=process.key, capacity=capacity, tty=process.is_tty
            )
        finally:
            wire.close_fds(output)
        reply = yield from self._loop.wait(opened, SPOOL_TIMEOUT_S, "the spooler")
        process.connected.resolve(None)
        return (*reply.fds, *(os.dup(fd) for fd in process.fds))

    def attach(self, process: Process) -> Task[tuple[int, ...]]:
        """Its descriptors again, for a daemon that starts anew. With a spool: the eventfd, a memfd
        for each stream, stdin (if it is still open) or the terminal's master. NodeError where the
        spooler has lost them."""
        copies = tuple(os.dup(fd) for fd in process.fds)
        if not process.spooled:
            return copies
        try:
            asked = self._spooler.request("fds", process=process.key)
            reply = yield from self._loop.wait(asked, SPOOL_TIMEOUT_S, "the spooler")
        except (OSError, TimeoutError) as error:
            wire.close_fds(copies)
            raise NodeError(f"the output of the process is lost: {error}") from error
        return (*reply.fds, *copies)

    def rows(self, sandbox_id: str, after: str) -> tuple[list[dict[str, Any]], bool]:
        """A page of those that were started, by id, and whether there are more."""
        rows = [
            process.row()
            for name, process in sorted(self._table.get(sandbox_id, {}).items())
            if name > after and process.connected.settled
        ]
        return rows[:LIST_PAGE], len(rows) > LIST_PAGE

    def signal(self, process: Process, number: int, scope: KillScope) -> None:
        """Signal its main process, or all that it started. What has ended gets none."""
        slot = process.sandbox.slot
        if slot is not None and process.number:
            if scope == KillScope.KILL_TREE and number == signal.SIGKILL and process.gone is None:
                process.gone = Promise()
            if scope == KillScope.KILL_TREE and number == signal.SIGKILL:
                slot.cgroups.kill_exec(process.cgroup)
            try:
                slot.pid1.signal(process.number, number, scope)
            except BrokenPipeError:
                if process.gone is not None:
                    process.gone.resolve(None)

    def deliver(self, process: Process, number: int, scope: KillScope) -> Task[None]:
        """The same, and returns once it is sent: what is written to the process from then on comes
        behind it. A PID 1 that its own sandbox keeps from running is not waited for for ever."""
        self.signal(process, number, scope)
        slot = process.sandbox.slot
        if slot is not None and not slot.dead.settled:
            with suppress(OSError, TimeoutError):
                yield from self._loop.wait(slot.pid1.ping(), DELIVERY_TIMEOUT_S, "a signal")

    def close_stdin(self, process: Process) -> None:
        """Our copy; the daemon closes its own. Not for terminals."""
        if process.spooled and not process.is_tty:
            fds, process.fds = process.fds, []
            wire.close_fds(fds)

    def remove(self, process: Process) -> Task[None]:
        """Kill all of its tree and forget it; returns when none of it lives.

        Raises NodeError where that takes too long; it stays in the table then.
        """
        slot = process.sandbox.slot
        if slot is not None and process.number and not slot.dead.settled:
            self.signal(process, signal.SIGKILL, KillScope.KILL_TREE)
            assert process.gone is not None
            try:
                yield from self._loop.wait(process.gone, GONE_TIMEOUT_S, "its end")
            except TimeoutError as error:
                raise NodeError("the process cannot be killed yet") from error
        self._drop(process)

    def forget_sandbox(self, sandbox_id: str) -> None:
        """The sandbox is deleted."""
        for process in list(self._table.get(sandbox_id, {}).values()):
            self._drop(process)
        self._table.pop(sandbox_id, None)

    def _drop(self, process: Process) -> None:
        mine = self._table.get(process.sandbox.id, {})
        if mine.get(process.id) is not process:
            return
        del mine[process.id]
        if process.sandbox.slot is not None and process.number:
            process.sandbox.slot.pid1.forget(process.number)
        wire.close_fds(process.fds)
        process.fds = []
        if process.spooled:
            self._spooler.request("drop", process=process.key)

    # --- what PID 1 says ---------------------------------------------------------------------

    def _answered(self, process: Process, answer: wire.Message | None, fds: list[int]) -> None:
        """Answers come in order: R_STARTED (with the pipes), R_EXIT, perhaps R_GONE."""
        if answer is None:
            process.started.reject(BrokenPipeError(32, "PID 1 is gone"))
            self._loop.spawn(self._ended(process, None))
            if process.gone is not None:
                process.gone.resolve(None)
            return
        if answer.type == MsgType.R_STARTED and not process.started.settled:
            process.fds = fds
            process.started.resolve(answer)
            return
        wire.close_fds(fds)
        if answer.type == MsgType.R_EXIT:
            if not process.started.settled:
                # Its set-up failed so early that it has no pipes: told as a failure to start.
                exited = wire.unpack_exited(answer.payload).failure
                failure = wire.FAILURE.pack(exited.step, exited.index, exited.err, 0)
                process.started.resolve(wire.Message(MsgType.R_FAILED, answer.id, failure))
            else:
                self._loop.spawn(self._ended(process, answer.payload))
        elif answer.type == MsgType.R_GONE:
            if process.gone is not None:
                process.gone.resolve(None)
        elif answer.type == MsgType.R_FAILED:
            process.started.resolve(answer)

    def _ended(self, process: Process, payload: bytes | None) -> Task[None]:
        """Tell its end, once what it left in its pipes is in the spool."""
        if process.exit is not None:
            return
        yield process.connected
        if process.spooled:
            with suppress(OSError, TimeoutError):
                drained = self._spooler.request("drain", process=process.key)
                yield from self._loop.wait(drained, SPOOL_TIMEOUT_S, "the spooler")
        slot = process.sandbox.slot
        if payload is None and slot is not None:
            # PID 1's socket ends before PID 1 does, and why is known with its death.
            with suppress(OSError, TimeoutError):
                yield from self._loop.wait(slot.dead, GONE_TIMEOUT_S, "the end of PID 1")
        if process.exit is None:
            process.exit = {"at": time.time(), **self._how(process, payload)}
            self._on_exit(process)

    @staticmethod
    def _how(process: Process, payload: bytes | None) -> dict[str, Any]:
        slot = process.sandbox.slot
        oom_kills = 0
        with suppress(OSError):
            oom_kills = (slot.cgroups.oom_kills() if slot else 0) - process.oom_kills
        if payload is None:
            return {"lost": process.sandbox.reason or "exited", "oom": oom_kills > 0}
        exited = wire.unpack_exited(payload)
        return {
            "failure": [exited.failure.step, exited.failure.index, exited.failure.err],
            "status": exited.status,
            "user_us": exited.user_us,
            "system_us": exited.system_us,
            "maxrss_kb": exited.maxrss_kb,
            "oom": oom_kills > 0,
        }
