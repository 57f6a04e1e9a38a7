"""The bearer token, on every route but liveness, readiness and the status page, which is a page
without a single figure in it and asks for the token itself.

A plain ASGI middleware, before the router, so that no route need remember it. What is no route is
only told to who may ask, and the OpenAPI document too, as it names the daemon's version.
"""

from __future__ import annotations

import hmac
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from sandboxd.api.exception_handlers import error_response, note
from sandboxd.errors import ConfigError, Unauthorized

OPEN_PATHS: Final = frozenset({"/", "/healthz", "/readyz"})
_SCHEME: Final = b"bearer "


class BearerAuth:
    """Refuses requests without ``Authorization: Bearer TOKEN``."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        if not token:
            raise ConfigError("there is no token", hint="the daemon makes one at its first start")
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._may(scope):
            await self._app(scope, receive, send)
        else:
            # Of a WebSocket it is the answer to its handshake.
            error = Unauthorized(
                "a bearer token is needed", hint="it is in the file that token_file names"
            )
            await error_response(note(scope, error))(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or given[0][: len(_SCHEME)].lower() != _SCHEME:
            return False
        # In constant time, so that a token cannot be found out byte by byte.
        return hmac.compare_digest(given[0][len(_SCHEME) :].strip(), self._token)
