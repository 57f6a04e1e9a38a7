"""A persistent interpreter in a sandbox: one command at a time, each with its own end.

Its pipes are the launcher's (a background process without a spool), so it outlives the daemon; what
is read here has backpressure as an exec's has. ``shells`` has what is said to it.

A command ends when the interpreter says so, and what is in the pipes by then is its output: a job
that it leaves in the background may hold them open. What such jobs write while no command runs is
thrown away; while one runs it is told with it, as in a terminal.

When the time is up, or on request: SIGINT to everything, which ends the command and spares what
runs in the background of a shell; after a grace SIGKILL to everything but the interpreter; and if
even that brings no end, SIGKILL to all, which ends the session. So no command lasts for ever.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sandboxd.errors import SandboxdError, SessionBusy, SessionEnded
from sandboxd.init.protocol import KillScope, close_fds
from sandboxd.model import ExecRequest, ExecResult, TimeoutReason
from sandboxd.runtime import shells
from sandboxd.runtime.exec import EXIT_TIMED_OUT, GONE_WAIT_S, Exec, Sink
from sandboxd.runtime.failures import death
from sandboxd.runtime.output import Capture
from sandboxd.runtime.pipes import CHUNK_BYTES, read_available
from sandboxd.runtime.processes import Process
from sandboxd.runtime.sandbox import Sandbox
from sandboxd.runtime.shells import Dialect

HELLO_S: Final = 20.0
HELLO_AGAIN_S: Final = 2.0
ASK_AGAIN_S: Final = 0.2
"""From an interrupt to asking a shell again for its status."""
KILL_S: Final = 1.0
"""From an interrupt that brings no end to SIGKILL, and from that to the session's end."""
IDLE_PAUSE_S: Final = 0.05
STATUS_LINE_MAX: Final = 4096
NOTHING: Final = "/dev/null"
PACKET_BYTES: Final = 1000
"""Below the smallest buffer that a shell reads its script with (musl's BUFSIZ, 1024): what a read
has no room for of a packet is lost."""


@dataclass(slots=True)
class _Running:
    nonce: str
    sinks: tuple[Sink, Sink]
    done: asyncio.Future[ExecResult]
    started_at: float
    timer: asyncio.TimerHandle | None = None
    timed_out: bool = False
    paused: bool = False


def new_nonce() -> str:
    return secrets.token_hex(16)


Signal = Callable[[int, KillScope], None]
"""Sends a signal to the interpreter (KILL_MAIN), its children, or both, and does not wait."""


class Session:
    """One interpreter. Everything runs in the event loop's thread."""

    def __init__(self, process: Process, fds: list[int], send_signal: Signal) -> None:
        self._loop = asyncio.get_running_loop()
        self.process = process
        self._out, self._err, self._in, self._status = fds
        self._signal = send_signal
        self._outputs = [self._out, self._err]
        self._watched: set[int] = set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._status_text = b""
        self._status_open = True
        self._unsent: deque[bytes] = deque()
        self._writing = False
        self._running: _Running | None = None
        self._hello: asyncio.Future[Dialect] | None = None
        self._hello_nonce = ""
        self.dialect = Dialect.SH
        self._last_code = 0
        self._size: tuple[int, int] | None = None
        self.unsure = False
        """Whether an interrupt may still be on its way to it: then greet it before a command."""
        self.released = False
        for fd in fds:
            os.set_blocking(fd, False)
        self._loop.add_reader(self._status, self._status_readable)
        for fd in self._outputs:
            self._watch(fd)
        process.on_exit = self._exited
        process.on_failure = self._sandbox_failed

    @property
    def busy(self) -> bool:
        return self._running is not None

    @property
    def ended(self) -> bool:
        return self.released or self.process.exit is not None

    # --- its start ---------------------------------------------------------------------------

    async def greet(self, nonce: str, text: bytes) -> None:
        """Wait until it takes commands; what it says until then is thrown away.

        An interpreter that is interrupted may forget what it was told, so it is told again.
        Raises SessionEnded.
        """
        hello = self._hello = self._loop.create_future()
        self._hello_nonce = nonce
        if self.ended:
            self._exited()
        try:
            async with asyncio.timeout(HELLO_S):
                while not hello.done():
                    if text:
                        self._write(text)
                    await asyncio.wait((hello,), timeout=HELLO_AGAIN_S)
                self.dialect = hello.result()
                if self.dialect is Dialect.SH:
                    # One read takes one write, pipe(2): see ``command_text``.
                    fcntl.fcntl(self._in, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT)
        except TimeoutError:
            self._signal(signal.SIGKILL, KillScope.KILL_TREE)
            raise SessionEnded("the session's interpreter does not answer") from None
        finally:
            self._hello = None
            hello.cancel()
        self.unsure = False
        for fd in self._outputs:
            read_available(fd, lambda _: None)

    # --- its commands ------------------------------------------------------------------------

    def start(
        self,
        command: str,
        *,
        timeout_s: float,
        sinks: tuple[Sink, Sink],
        stdin_path: str = NOTHING,
    ) -> SessionCommand:
        """Send a command off. Raises SessionBusy and SessionEnded."""
        self.check_free()
        nonce = new_nonce()
        running = _Running(nonce, sinks, self._loop.create_future(), time.perf_counter())
        self._running = running
        for fd in self._outputs:
            self._watch(fd)
        running.timer = self._loop.call_later(timeout_s, self._time_up, running)
        if self._size is not None:
            self._write(*shells.size_text(self.dialect, *self._size))
            self._size = None
        self._write(*shells.command_text(self.dialect, command, nonce, stdin_path, self._last_code))
        return SessionCommand(self, running.done)

    def check_free(self) -> None:
        """Raises SessionBusy and SessionEnded."""
        if self.ended:
            code = self.process.exit.exit_code if self.process.exit else None
            raise SessionEnded("the session's interpreter has ended", exit_code=code)
        if self._running is not None:
            raise SessionBusy("the session runs a command", hint="one at a time; open another")

    def resize(self, cols: int, rows: int) -> None:
        """Before the next command. Raises SessionEnded."""
        if self.ended:
            raise SessionEnded("the session's interpreter has ended")
        self._size = (cols, rows)

    def interrupt(self) -> bool:
        """End the command that runs, and keep the session; False where none does."""
        if self._running is None:
            return False
        self._interrupt(self._running)
        return True

    def _time_up(self, running: _Running) -> None:
        running.timed_out = True
        self._interrupt(running)

    def _interrupt(self, running: _Running) -> None:
        if running.timer is not None:
            running.timer.cancel()
        self.unsure = True
        self.resume()
        self._signal(signal.SIGINT, KillScope.KILL_TREE)
        running.timer = self._loop.call_later(ASK_AGAIN_S, self._ask_again, running)

    def _ask_again(self, running: _Running) -> None:
        if self.dialect is not Dialect.PYTHON:
            self._write(shells.report_text(self.dialect, running.nonce))
        running.timer = self._loop.call_later(KILL_S, self._kill_children, running, 3)

    def _kill_children(self, running: _Running, again: int) -> None:
        self._signal(signal.SIGKILL, KillScope.KILL_CHILDREN)
        # And once more an interrupt: what the interpreter does next in a loop is its own.
        self._signal(signal.SIGINT, KillScope.KILL_MAIN)
        step = self._kill_children if again else self._give_up
        arguments = (running, again - 1) if again else (running,)
        running.timer = self._loop.call_later(KILL_S / 3, step, *arguments)

    def _give_up(self, running: _Running) -> None:
        self._signal(signal.SIGKILL, KillScope.KILL_TREE)
        # As of an exec: what still lives then cannot be killed, and ends the sandbox.
        running.timer = self._loop.call_later(GONE_WAIT_S, self.process.sandbox.unkillable)

    def pause(self) -> None:
        """Read no output until ``resume``: the command waits once its pipes are full."""
        if self._running is not None:
            self._running.paused = True
            for fd in list(self._watched):
                self._unwatch(fd)

    def resume(self) -> None:
        if self._running is not None and self._running.paused:
            self._running.paused = False
            for fd in self._outputs:
                self._watch(fd)

    # --- what it says ------------------------------------------------------------------------

    def _status_readable(self) -> None:
        try:
            data = os.read(self._status, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # The interpreter has closed it: it ends, or has become another program (exec).
            self._loop.remove_reader(self._status)
            self._status_open = False
            return
        *lines, rest = (self._status_text + data).split(b"\n")
        self._status_text = rest[-STATUS_LINE_MAX:]
        for line in lines:
            status = shells.parse_status(line)
            if status is not None:
                self._said(status)

    def _said(self, status: shells.Status) -> None:
        if self._hello is not None and status.nonce == self._hello_nonce:
            if not self._hello.done():
                self._hello.set_result(status.dialect or self.dialect)
        elif self._running is not None and status.nonce == self._running.nonce:
            # After an interrupt it would only be ours, and `set -e` would end the shell by it.
            self._last_code = 0 if self.unsure else status.code
            self._finish(status.code, None)

    def _exited(self) -> None:
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(SessionEnded("the session's interpreter could not be run"))
        end = self.process.exit
        if self._running is None or end is None:
            return
        if end.failure is not None:
            self._finish(error=end.failure)
        else:
            self._finish(end.exit_code or 0, end.signal)

    def _sandbox_failed(self, error: SandboxdError) -> None:
        """The interpreter's own end may be told late, or by nobody."""
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(error)
        if self._running is not None:
            self._finish(error=error)

    def _finish(
        self, code: int = 0, number: int | None = None, *, error: SandboxdError | None = None
    ) -> None:
        running, self._running = self._running, None
        assert running is not None
        if running.timer is not None:
            running.timer.cancel()
        for fd, sink in zip(self._outputs, running.sinks, strict=True):
            read_available(fd, sink.feed)
            self._watch(fd)
        if running.done.done():
            return
        if error is None and not self.process.sandbox.is_sound:
            # What the interpreter tells of reads that failed is no result.
            error = death("image-lost")
        if error is not None:
            running.done.set_exception(error)
            running.done.exception()
            return
        running.done.set_result(
            ExecResult(
                exit_code=EXIT_TIMED_OUT if running.timed_out else code,
                signal=number,
                timed_out=running.timed_out,
                oom_killed=bool(self.process.exit and self.process.exit.oom_killed),
                stdout=running.sinks[0].result(),
                stderr=running.sinks[1].result(),
                wall_s=time.perf_counter() - running.started_at,
                cpu_user_s=0.0,
                cpu_system_s=0.0,
                peak_memory_bytes=0,
                timeout_reason=TimeoutReason.WALL if running.timed_out else None,
            )
        )

    # --- its pipes ---------------------------------------------------------------------------

    def _watch(self, fd: int) -> None:
        if fd not in self._watched and not self.released:
            timer = self._timers.pop(fd, None)
            if timer is not None:
                timer.cancel()
            self._watched.add(fd)
            self._loop.add_reader(fd, self._readable, fd)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            self._watched.discard(fd)
            self._loop.remove_reader(fd)

    def _readable(self, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._unwatch(fd)
        elif self._running is not None:
            self._running.sinks[self._outputs.index(fd)].feed(data)
        else:
            # Nobody's output: slowly, so that a background `yes` costs next to nothing.
            self._unwatch(fd)
            self._timers[fd] = self._loop.call_later(IDLE_PAUSE_S, self._watch, fd)

    def _write(self, *parts: bytes) -> None:
        for part in parts:
            self._unsent += [
                part[at : at + PACKET_BYTES] for at in range(0, len(part), PACKET_BYTES)
            ]
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = os.write(self._in, self._unsent[0])
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._in, self._flush)
                return
            except OSError:  # EPIPE: it ends, which is told elsewhere
                self._unsent.clear()
                break
            rest = self._unsent.popleft()[sent:]
            if rest:
                self._unsent.appendleft(rest)
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._in)

    def release(self, error: SandboxdError) -> None:
        """Let go of everything here; a command that runs ends with ``error``. Idempotent."""
        if self.released:
            return
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(error)
        if self._running is not None:
            self._finish(error=error)
        self.released = True
        self.process.on_exit = self.process.on_failure = None
        for timer in self._timers.values():
            timer.cancel()
        for fd in list(self._watched):
            self._unwatch(fd)
        if self._status_open:
            self._loop.remove_reader(self._status)
        if self._writing:
            self._loop.remove_writer(self._in)
        close_fds((self._out, self._err, self._in, self._status))


class SessionCommand:
    """One command of a session, as a stream's source or to be waited for."""

    def __init__(self, session: Session, done: asyncio.Future[ExecResult]) -> None:
        self._session = session
        self.done = done

    def pause(self) -> None:
        if not self.done.done():
            self._session.pause()

    def resume(self) -> None:
        if not self.done.done():
            self._session.resume()

    def cancel(self) -> None:
        """As an interrupt: the session stays."""
        if not self.done.done():
            self._session.interrupt()


class GivenStdin:
    """A pipe in the sandbox that a session's command can open by a path.

    Held by a stopped program of the same user: its ``/proc/PID/fd/0``. No file of the sandbox is
    written for it, and any bytes go through it.
    """

    def __init__(self, sandbox: Sandbox, data: bytes, user: str) -> None:
        self._pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._number = 0
        request = ExecRequest(
            command="echo; kill -STOP $$", stdin=data, user=user, cwd="/", timeout_s=86_400.0
        )
        self._holder: Exec = sandbox.start_exec(
            request, sinks=(_Ready(self._ready), Capture(0, request.truncate)),
            on_started=self._started,
        )  # fmt: skip
        self._holder.done.add_done_callback(self._over)

    def _started(self, pid: int) -> None:
        self._number = pid

    def _ready(self) -> None:
        if not self._pid.done():
            self._pid.set_result(self._number)

    def _over(self, done: asyncio.Future[ExecResult]) -> None:
        error = None if done.cancelled() else done.exception()
        if not self._pid.done():
            self._pid.set_exception(error or SessionEnded("the command's stdin could not be made"))
            self._pid.exception()

    async def path(self) -> str:
        return f"/proc/{await self._pid}/fd/0"

    def close(self) -> None:
        self._holder.cancel()


class _Ready(Capture):
    """Calls back at the first byte."""

    __slots__ = ("_on_first",)

    def __init__(self, on_first: Callable[[], None]) -> None:
        super().__init__(0, ExecRequest(command="").truncate)
        self._on_first = on_first

    def feed(self, data: bytes) -> None:
        del data
        self._on_first()
