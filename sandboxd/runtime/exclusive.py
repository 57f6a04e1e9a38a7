"""A command that has its sandbox to itself (``ExecRequest.exclusive``): how a grader is run.

All other processes of the sandbox (commands, sessions, background processes, whatever they left
behind) are killed, or frozen until it ends; meanwhile nothing else is started in it, and its files
are not touched, but by the command. So it is neither raced nor watched: what is frozen cannot trace
it, write to its files or read its memory. What it leaves behind is killed before its answer.

Only killing takes everything away: a frozen process keeps its file locks and leases, on which the
command may wait until its time is up, and an inotify watch tells it afterwards which files the
command has touched. And neither undoes what was done to the files before (``copy_from`` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sandboxd.errors import SandboxdError, SandboxExclusive
from sandboxd.model import Exclusive, ExecRequest, ExecResult
from sandboxd.runtime.control import Control
from sandboxd.runtime.exec import Exec, Sink
from sandboxd.runtime.ping import Ping
from sandboxd.runtime.sandbox import Sandbox

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

log = logging.getLogger(__name__)

_DONE = {Exclusive.KILL: "killed", Exclusive.FREEZE: "frozen"}


async def start(
    runtime: Runtime,
    sandbox: Sandbox,
    request: ExecRequest,
    *,
    sinks: tuple[Sink, Sink] | None = None,
    on_started: Callable[[int], None] | None = None,
    exec_id: str | None = None,
) -> tuple[Exec, asyncio.Future[ExecResult]]:
    """Send a command off, exclusive or not. What is returned beside it ends as ``Exec.done`` does,
    and not before the sandbox is for all again.

    Raises SandboxExclusive where another command has it, SandboxBusy, SandboxPaused,
    ProcessesStuck, and what ``Sandbox.start_exec`` raises.
    """
    how = request.exclusive
    if how is None:
        running = sandbox.start_exec(request, sinks=sinks, on_started=on_started, exec_id=exec_id)
        return running, running.done
    control = sandbox.control_to_start()
    sandbox.alone = control.alone = True
    sandbox.ports.end(SandboxExclusive("an exclusive command has the sandbox to itself"))
    try:
        # Sent before: what the daemon had asked for is cloned once this is answered.
        await Ping(control).answered()
        await runtime.launcher.call("exclusive", sandbox=sandbox.id, how=str(how))
        sandbox.events.add("exclusive", f"all that ran in it is {_DONE[how]}", how=str(how))
        running = sandbox.start_exec(
            request, sinks=sinks, on_started=on_started, exec_id=exec_id, alone=True
        )
    except BaseException:
        # In a task of its own: a client that goes must not leave the others frozen.
        await asyncio.shield(runtime.spawn(_end(runtime, sandbox, control)))
        raise
    over: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()
    runtime.spawn(_finish(runtime, sandbox, control, running, over))
    return running, over


async def _finish(
    runtime: Runtime,
    sandbox: Sandbox,
    control: Control,
    running: Exec,
    over: asyncio.Future[ExecResult],
) -> None:
    try:
        await asyncio.wait([running.done])
        await _end(runtime, sandbox, control)
    finally:
        if not over.done():
            _copy(running.done, over)


def _copy(done: asyncio.Future[ExecResult], over: asyncio.Future[ExecResult]) -> None:
    if not done.done() or done.cancelled():
        over.cancel()
    elif (error := done.exception()) is not None:
        over.set_exception(error)
        over.exception()  # whoever waited may have gone
    else:
        over.set_result(done.result())


async def _end(runtime: Runtime, sandbox: Sandbox, control: Control) -> None:
    """Let the sandbox be for all again; one that is gone needs nothing."""
    try:
        await runtime.launcher.call("exclusive", sandbox=sandbox.id, how="end")
    except SandboxdError as error:
        log.warning(
            "sandbox %s after an exclusive command: %s",
            sandbox.id,
            error.message,
            extra=sandbox.about,
        )
        sandbox.events.add("exclusive-end-failed", error.message, code=error.code)
    finally:
        # What the kill ended is told by PID 1 after it: let that be heard first.
        with contextlib.suppress(SandboxdError):
            await Ping(control).answered()
        sandbox.alone = control.alone = False
