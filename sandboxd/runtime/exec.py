"""One command in a sandbox: its clock, its output, its end.

In the order of a plain command::

    M_EXEC out -> R_STARTED (pipes) -> R_EXIT -> what is in the pipes -> result

An exec ends when its main process has, never at the end of a pipe, which a background child may
hold for ever. When the time is up (the clock is this machine's monotonic one and starts when the
command is asked for) the whole tree gets SIGTERM, after the grace SIGKILL, and the answer waits for
R_GONE, so that nothing of the command lives when the caller reads it. If the main process ends
within the grace, the rest is killed at once: it had its SIGTERM too. A command that waited for an
image's server that hangs is no slow command: the servers are asked before that is a result.

All of this runs in callbacks of the event loop; the only thing to await is ``Exec.done``. This is
the hot path: a command that writes little and ends within ``ATTACH_DELAY_S`` costs one send, two
receives, one read and one close a pipe, and the loop never polls its pipes.

Where the output goes is the caller's: by default into captures that keep a bounded part; a stream
gives sinks of its own, and pauses the reading of the pipes while its reader is behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Final, Protocol

from sandboxd.errors import ImageUnavailable, OomKilled, SandboxDead, SandboxdError, SandboxLost
from sandboxd.init import protocol
from sandboxd.init.protocol import (
    Exited,
    KillScope,
    MsgType,
    ProtocolError,
)
from sandboxd.model import ExecRequest, ExecResult, StreamResult, TimeoutReason
from sandboxd.runtime.control import Control
from sandboxd.runtime.failures import exec_failure, exit_code, has_run
from sandboxd.runtime.oom import OomCounter
from sandboxd.runtime.output import Capture
from sandboxd.runtime.pipes import CHUNK_BYTES, Feeder, Leftovers, read_available

EXIT_TIMED_OUT: Final = 124

ATTACH_DELAY_S: Final = 0.002
"""How long the pipes wait before the event loop polls them. A command that has filled a pipe by
then stands still for the rest of it, once."""

GONE_WAIT_S: Final = 30.0
"""From SIGKILL to R_GONE at most: after that a process of the sandbox cannot be killed (it sleeps
in a file system whose server is stopped), and the sandbox is given up."""


class Sink(Protocol):
    """Where one stream of a command's output goes."""

    def feed(self, data: bytes) -> None: ...

    def result(self) -> StreamResult:
        """What the result says of the stream."""


class Exec:
    """A command on its way. ``done`` ends with its ExecResult or with a SandboxdError."""

    __slots__ = (
        "_captures",
        "_cgroup",
        "_check_images",
        "_control",
        "_cwd",
        "_deadline",
        "_delivered",
        "_exited",
        "_exited_at",
        "_gone",
        "_id",
        "_images_answer",
        "_killed",
        "_leftovers",
        "_loop",
        "_on_kill",
        "_on_unkillable",
        "_oom",
        "_oom_before",
        "_output_at",
        "_paused",
        "_pipes",
        "_polled",
        "_request",
        "_started_at",
        "_stdin",
        "_timed_out",
        "_timeout_reason",
        "_timer",
        "_user",
        "done",
        "on_started",
    )

    def __init__(
        self,
        control: Control,
        request: ExecRequest,
        *,
        user: str,
        cwd: str,
        oom: OomCounter,
        leftovers: Leftovers,
        on_kill: Callable[[int], None],
        on_unkillable: Callable[[], None],
        check_images: Callable[[Callable[[bool], None]], None] = lambda told: told(True),
        sinks: tuple[Sink, Sink] | None = None,
        on_started: Callable[[int], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._request = request
        self._user = user
        self._cwd = cwd
        self._oom = oom
        self._leftovers = leftovers
        self._on_kill = on_kill
        self._on_unkillable = on_unkillable
        self._check_images = check_images
        self._images_answer: bool | None = None
        self._captures: tuple[Sink, Sink] = sinks or (
            Capture(request.max_output_bytes, request.truncate),
            Capture(request.max_output_bytes, request.truncate),
        )
        self.on_started = on_started
        """Called with the command's pid in the sandbox, before any output is read."""
        self._pipes: list[int] = []
        self._polled: set[int] = set()
        self._paused = False
        self._output_at = 0.0
        self._delivered = False
        self._stdin: Feeder | None = None
        self._exited: Exited | None = None
        self._exited_at = 0.0
        self._gone = False
        self._killed = False
        self._cgroup = 0
        self._timed_out = False
        self._timeout_reason: TimeoutReason | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.done: asyncio.Future[ExecResult] = self._loop.create_future()

    def start(self, payload: bytes, flags: int) -> None:
        """Send the command (a ``PackedCommand``). Raises like ``Control.send`` and ``register``."""
        self._id = self._control.register(self)
        self._oom_before = self._oom.read()
        # Not the loop's time for what is told: uvloop's has a grain of a millisecond.
        self._started_at = time.perf_counter()
        loop_now = self._output_at = self._loop.time()
        self._deadline = loop_now + self._request.timeout_s
        try:
            self._control.send(MsgType.M_EXEC, self._id, payload, flags=flags)
        except BaseException:
            self._control.forget(self._id)
            raise
        first = min(self._deadline, loop_now + ATTACH_DELAY_S)
        self._timer = self._loop.call_at(first, self._tick)

    def cancel(self) -> None:
        """Kill the command's tree; ``done`` ends as always, once nothing of it lives."""
        if not self.done.done() and not self._killed:
            self._kill()

    # --- what the clock says -----------------------------------------------------------------

    def _tick(self) -> None:
        self._delivered = True
        self._poll_pipes()
        self._look_at_clock()

    def _look_at_clock(self) -> None:
        idle_s = self._request.idle_output_timeout_s
        # While the reading is paused, it is the reader who is silent.
        silent_from = self._loop.time() if self._paused else self._output_at
        silent_until = self._deadline if idle_s is None else silent_from + idle_s
        due = min(self._deadline, silent_until)
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look_at_clock)
        else:
            self._time_up(
                TimeoutReason.WALL if self._deadline <= silent_until else TimeoutReason.IDLE_OUTPUT
            )

    def _time_up(self, reason: TimeoutReason) -> None:
        self._timed_out = True
        self._timeout_reason = reason
        self._poll_pipes()
        self._check_images(self._images_told)
        if self._request.grace_s <= 0:
            self._kill()
            return
        # The timer first: sending may end this exec when the sandbox does not take it.
        self._timer = self._loop.call_later(self._request.grace_s, self._kill)
        self._signal_tree(signal.SIGTERM)

    def _images_told(self, answer: bool) -> None:
        self._images_answer = answer
        self._end()

    def _kill(self) -> None:
        self._killed = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(GONE_WAIT_S, self._unkillable)
        # Twice: PID 1 says when all are gone, but may itself be starved by what it shall kill.
        self._on_kill(self._cgroup)
        self._signal_tree(signal.SIGKILL)

    def _signal_tree(self, number: int) -> None:
        try:
            self._control.kill(self._id, number, KillScope.KILL_TREE)
        except SandboxdError as error:
            self._fail(error)

    def _unkillable(self) -> None:
        self._fail(SandboxLost("a process of the sandbox cannot be killed"))
        self._on_unkillable()

    # --- what PID 1 says ---------------------------------------------------------------------

    def reply(self, kind: int, payload: bytes, fds: list[int]) -> None:
        if kind == MsgType.R_STARTED:
            self._started(payload, fds)
            return
        protocol.close_fds(fds)
        if kind == MsgType.R_EXIT:
            if self._exited is not None:
                raise ProtocolError("a command that ended twice")
            self._exited = protocol.unpack_exited(payload)
            self._exited_at = time.perf_counter()
            if self._timed_out and not self._killed:
                self._kill()
            self._end()
        elif kind == MsgType.R_FAILED:
            failure = protocol.unpack_failure(payload)
            if self._killed and self._exited is not None:
                # The kill found nothing: its exec had ended by itself.
                self._gone = True
                self._end()
            else:
                self._fail(exec_failure(failure, user=self._user, cwd=self._cwd))
        elif kind == MsgType.R_GONE:
            self._gone = True
            self._end()
        else:
            raise ProtocolError(f"reply {kind} to a command")

    def _started(self, payload: bytes, fds: list[int]) -> None:
        tty, stdin = self._request.tty is not None, self._request.stdin
        outputs = 1 if self._request.merge_stderr or tty else 2
        wanted = outputs + (1 if stdin is not None and not tty else 0)
        if self._pipes or len(fds) < wanted:
            protocol.close_fds(fds)
            raise ProtocolError(f"a command started with {len(fds)} pipes")
        protocol.close_fds(fds[wanted:])
        self._pipes = fds[:outputs]
        for fd in self._pipes:
            os.set_blocking(fd, False)
        if stdin is not None:
            self._stdin = Feeder(os.dup(fds[0]) if tty else fds[outputs], stdin)
        pid, self._cgroup = protocol.unpack_started(payload)
        if self.on_started is not None:
            self.on_started(pid)
        if self._delivered:
            self._poll_pipes()

    def lost(self, error: SandboxdError) -> None:
        if isinstance(error, SandboxDead) and self._oom.read() > self._oom_before:
            error = OomKilled("the sandbox ran out of memory and lost its PID 1")
        self._fail(error)

    # --- output ------------------------------------------------------------------------------

    def pause(self) -> None:
        """Read no more until ``resume``: the command waits once its pipes are full."""
        self._paused = True
        for fd in list(self._polled):
            self._stop_polling(fd)

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._output_at = self._loop.time()
            if self._delivered:
                self._poll_pipes()

    def _poll_pipes(self) -> None:
        if self._paused:
            return
        for fd, capture in zip(self._pipes, self._captures, strict=False):
            if fd >= 0 and fd not in self._polled:
                self._polled.add(fd)
                self._loop.add_reader(fd, self._readable, fd, capture)

    def _readable(self, fd: int, capture: Sink) -> None:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            if self._request.idle_output_timeout_s is not None:
                self._output_at = self._loop.time()
            capture.feed(data)
        else:
            self._close_pipe(fd)

    def _close_pipe(self, fd: int) -> None:
        self._stop_polling(fd)
        self._pipes[self._pipes.index(fd)] = -1
        os.close(fd)

    def _stop_polling(self, fd: int) -> None:
        if fd in self._polled:
            self._polled.discard(fd)
            self._loop.remove_reader(fd)

    # --- the end -----------------------------------------------------------------------------

    def _end(self) -> None:
        """Finish, if the main process has ended and, when killed, nothing of its tree lives."""
        exited = self._exited
        if exited is None or (self._killed and not self._gone) or self.done.done():
            return
        if not self._timed_out and not has_run(exited.failure):
            self._fail(exec_failure(exited.failure, user=self._user, cwd=self._cwd))
            return
        if self._timed_out and not self._images_answer:
            # None: not known yet, and then this is called again.
            if self._images_answer is False:
                self._fail(ImageUnavailable("the image's server did not answer in the meantime"))
            return
        for fd, capture in zip(self._pipes, self._captures, strict=False):
            if fd < 0:
                continue
            if read_available(fd, capture.feed):
                self._close_pipe(fd)
            else:
                self._stop_polling(fd)
                self._pipes[self._pipes.index(fd)] = -1
                self._leftovers.adopt(fd)
        result = self._result(exited)
        self._release()
        self.done.set_result(result)

    def _result(self, exited: Exited) -> ExecResult:
        code, number = exit_code(exited.status)
        oom_killed = (
            code == 128 + signal.SIGKILL
            and not self._killed
            and self._oom.read() > self._oom_before
        )
        stdout, stderr = self._captures
        return ExecResult(
            exit_code=EXIT_TIMED_OUT if self._timed_out else code,
            signal=number,
            timed_out=self._timed_out,
            timeout_reason=self._timeout_reason,
            oom_killed=oom_killed,
            stdout=stdout.result(),
            stderr=stderr.result(),
            wall_s=self._exited_at - self._started_at,
            cpu_user_s=exited.user_us / 1e6,
            cpu_system_s=exited.system_us / 1e6,
            peak_memory_bytes=exited.maxrss_kb * 1024,
        )

    def _fail(self, error: SandboxdError) -> None:
        self._release()
        if not self.done.done():
            self.done.set_exception(error)
            # Whoever waited may have gone: then nobody asks, and that is no news for the log.
            self.done.exception()

    def _release(self) -> None:
        self._control.forget(self._id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stdin is not None:
            self._stdin.close()
        for fd in self._pipes:
            if fd >= 0:
                self._stop_polling(fd)
                os.close(fd)
        self._pipes = []
