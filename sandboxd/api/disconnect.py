"""Noticing that a client has gone while its request is being worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")

WATCH_AFTER_S: Final = 0.05
"""Most commands have ended by then, and a task for each would cost more than they do."""


class ClientWatch:
    """Within its ``with``, calls ``on_gone`` once if the client goes. The body must be read before:
    what is received from then on can only be the disconnect."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive = receive
        self._on_gone = on_gone
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> ClientWatch:
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)
        return self

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_gone()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """What ``work`` returns; it is cancelled if the client goes before.

    Raises ClientDisconnect then. In the request's own task, without another one: what is made for
    this request alone (a sandbox whose id nobody will learn) is undone where it is awaited.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def on_gone() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    with ClientWatch(receive, on_gone):
        try:
            return await work
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            raise ClientDisconnect from None
