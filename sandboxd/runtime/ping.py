"""M_PING to a sandbox's PID 1: to know that all that was sent before has been dealt with."""

from __future__ import annotations

import asyncio
from typing import Final

from sandboxd.errors import SandboxdError, SandboxLost
from sandboxd.init import protocol
from sandboxd.init.protocol import MsgType
from sandboxd.runtime.control import Control

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
