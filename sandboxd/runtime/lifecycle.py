"""What is done to a sandbox between its making and its end: renew, pause, look; and ending many.

What must outlive the daemon (a new end of life, a pause) is noted with the launcher before it is
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sandboxd.errors import NodeUnavailable, SandboxdError, SandboxNotFound, SandboxPaused
from sandboxd.model import SandboxState
from sandboxd.runtime.ping import Ping
from sandboxd.runtime.sandbox import Sandbox, SandboxView, now

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

DELETE_AT_ONCE: Final = 64
"""Of a bulk deletion; the others wait, so that creates get their turn at the launcher."""


async def renew(runtime: Runtime, sandbox: Sandbox, ttl_s: float) -> SandboxView:
    """Let it live for ``ttl_s`` from now on, be that more or less than it had."""
    if sandbox.state is SandboxState.DELETING:
        raise SandboxNotFound(f"sandbox {sandbox.id} is being deleted")
    before = sandbox.renewed_until
    sandbox.renewed_until = now() + ttl_s
    try:
        await _note(runtime, sandbox)
    except BaseException:
        sandbox.renewed_until = before
        raise
    sandbox.events.add("renewed", f"for {ttl_s:g} s", ttl_s=ttl_s)
    runtime.watch_expiry(sandbox)
    return sandbox.view()


async def pause(runtime: Runtime, sandbox: Sandbox) -> SandboxView:
    """Freeze every process that its commands have started. Idempotent.

    Clocks go on: a command's time may be up while it is frozen, and then it is killed.
    """
    control = sandbox.control()
    if sandbox.state is SandboxState.PAUSED:
        return sandbox.view()
    # First, so that nothing new is started; then the ping: PID 1 answers in order, so every command
    # sent before has its cgroup once it is answered, and is seen by the freeze.
    sandbox.state = SandboxState.PAUSED
    sandbox.ports.end(SandboxPaused(f"sandbox {sandbox.id} was paused", hint="resume it first"))
    try:
        await Ping(control).answered()
        await _note(runtime, sandbox)
        await runtime.launcher.call("freeze", sandbox=sandbox.id, frozen=True)
    except BaseException:
        if sandbox.state is SandboxState.PAUSED:
            sandbox.state = SandboxState.RUNNING
            with contextlib.suppress(SandboxdError):
                await _note(runtime, sandbox)
        raise
    sandbox.events.add("paused", "its processes are frozen")
    return sandbox.view()


async def resume(runtime: Runtime, sandbox: Sandbox) -> SandboxView:
    """Let its processes go on. Idempotent."""
    sandbox.control()
    if sandbox.state is SandboxState.PAUSED:
        await runtime.launcher.call("freeze", sandbox=sandbox.id, frozen=False)
        if sandbox.state is SandboxState.PAUSED:
            sandbox.state = SandboxState.RUNNING
            sandbox.events.add("resumed", "its processes go on")
        await _note(runtime, sandbox)
    return sandbox.view()


async def usage(runtime: Runtime, sandbox: Sandbox) -> dict[str, Any]:
    """The launcher's figures (``launcher/usage.py``), read now."""
    if sandbox.state is SandboxState.CREATING:
        raise NodeUnavailable(f"sandbox {sandbox.id} is still being made", retry_after_s=1)
    return (await runtime.launcher.call("usage", sandbox=sandbox.id)).ok


@dataclass(frozen=True, slots=True)
class Deletions:
    """What became of each of many; ``pending`` goes on by itself."""

    deleted: list[str]
    pending: list[str]
    failed: dict[str, SandboxdError]


async def delete_all(runtime: Runtime, sandboxes: Iterable[Sandbox], within_s: float) -> Deletions:
    """Delete many, and answer within ``within_s`` whatever holds one of them up."""
    gate = asyncio.Semaphore(DELETE_AT_ONCE)

    async def delete(sandbox_id: str) -> None:
        async with gate:
            await runtime.delete(sandbox_id)

    tasks = {sandbox.id: runtime.spawn(delete(sandbox.id)) for sandbox in sandboxes}
    if tasks:
        await asyncio.wait(tasks.values(), timeout=within_s)
    result = Deletions([], [], {})
    for sandbox_id, task in tasks.items():
        if not task.done():
            result.pending.append(sandbox_id)
        elif isinstance(error := task.exception(), SandboxdError):
            result.failed[sandbox_id] = error
        else:
            result.deleted.append(sandbox_id)
    return result


async def _note(runtime: Runtime, sandbox: Sandbox) -> None:
    await runtime.launcher.call("note", sandbox=sandbox.id, meta=sandbox.meta())
