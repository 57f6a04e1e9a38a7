"""How many connections may be open at once: each is a descriptor, and a daemon that has none left
can neither accept nor start a command.

One too many first takes the place of one on which nothing was ever asked, then is answered 503 with
a Retry-After by the server itself; far too many are closed without a word.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sandboxd.api.exception_handlers import error_response
from sandboxd.errors import TooManyConnections

REFUSED_AT_ONCE: Final = 128
"""Beyond the limit, and told so."""
SILENT_S: Final = 5.0
"""Whoever has not asked anything for so long may have to go."""
RETRY_AFTER_S: Final = 5


def bounded(most: int) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with at most so many connections."""

    class Bounded(HttpToolsProtocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.made_at = time.monotonic()

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            beyond = len(self.connections) - most
            if beyond <= 0 or self._close_a_silent_one():
                return
            if beyond > REFUSED_AT_ONCE:
                transport.abort()
                return
            self.app = _refuse

        def _close_a_silent_one(self) -> bool:
            horizon = time.monotonic() - SILENT_S
            for one in self.connections:
                if (
                    isinstance(one, Bounded)
                    and one.cycle is None
                    and one.made_at < horizon
                    and not one.transport.is_closing()
                ):
                    one.transport.abort()
                    return True
            return False

    return Bounded


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = TooManyConnections(
        "as many clients are connected as may be", retry_after_s=RETRY_AFTER_S
    )
    await error_response(error, {"Connection": "close"})(scope, receive, send)
