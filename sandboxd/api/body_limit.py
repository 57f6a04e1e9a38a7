"""How large a request may be: a JSON body is held in memory, so it is bounded before it is read.

A file's content is not (its route streams it and knows its own bound).
"""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandboxd.api.exception_handlers import error_response, note
from sandboxd.errors import BodyTooLarge

_TO_A_PORT: Final = re.compile(r"/v1/sandboxes/[^/]*/ports/[^/]*/http/")


class BodyLimit:
    """Answers 413 to a body that says it is larger, and cuts one off that grows larger unsaid."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _streams(scope):
            await self._app(scope, receive, send)
            return
        length = content_length(scope)
        if length is None:
            await self._app(scope, self._counted(receive), send)
        elif length > self._max:
            await error_response(note(scope, self._error()))(scope, receive, send)
        else:
            # The server itself holds a body to the length it says.
            await self._app(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max:
                raise self._error()
            return message

        return counted

    def _error(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"a request has {self._max} bytes at most",
            hint="PUT large content to /v1/sandboxes/{id}/files",
            max_bytes=self._max,
        )


def _streams(scope: Scope) -> bool:
    path: str = scope["path"]
    if _TO_A_PORT.match(path):
        return True
    return bool(scope["method"] == "PUT" and path.endswith(("/files", "/archive")))


def content_length(scope: Scope) -> int | None:
    """What Content-Length says; None without it."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None
