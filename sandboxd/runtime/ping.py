"""M_PING to a sandbox's PID 1: to know that all that was sent before has been dealt with."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from sandboxd.errors import SandboxdError, SandboxLost
from sandboxd.init import protocol
from sandboxd.init.protocol import MsgType
from sandboxd.runtime.control import Control
from sandboxd.runtime.failures import death
from sandboxd.runtime.sandbox import Sandbox

PING_TIMEOUT_S: Final = 10.0


class Ping:
    """Answered once PID 1 has dealt with all that was sent before on this socket."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answered(self) -> None:
        number = self._control.register(self)
        try:
            self._control.send(MsgType.M_PING, number, b"")
            async with asyncio.timeout(PING_TIMEOUT_S):
                await self._done
        except TimeoutError:
            raise SandboxLost("the sandbox's PID 1 does not answer", reason="silent") from None
        finally:
            self._control.forget(number)

    def reply(self, kind: int, payload: bytes, fds: list[int]) -> None:
        del payload
        protocol.close_fds(fds)
        if kind != MsgType.R_DONE:
            raise protocol.ProtocolError(f"reply {kind} to a ping")
        if not self._done.done():
            self._done.set_result(None)

    def lost(self, error: SandboxdError) -> None:
        if not self._done.done():
            self._done.set_exception(error)


async def failure_of(sandbox: Sandbox) -> SandboxdError | None:
    """What a sandbox has failed with; None where it lives.

    For a request that met something else first: what a dead sandbox lacks (a process, an answer) is
    told by others before why it is dead, and would look like the workload's or the caller's doing.
    """
    if sandbox.failure is None and not sandbox.is_sound:
        return death("image-lost")
    with suppress(SandboxdError):
        await Ping(sandbox.control(alone=True)).answered()
    return sandbox.failure
