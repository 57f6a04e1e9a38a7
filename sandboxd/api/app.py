"""create_app: the FastAPI application, and everything that hangs off it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp, Receive, Scope, Send

from sandboxd import __version__
from sandboxd.api import exception_handlers
from sandboxd.api.auth import OPEN_PATHS, BearerAuth
from sandboxd.api.bodies import lift_definitions
from sandboxd.api.body_limit import BodyLimit
from sandboxd.api.exception_handlers import documented
from sandboxd.api.routes import (
    archives,
    batch,
    diffs,
    drain,
    egress,
    eyes,
    files,
    health,
    images,
    lifecycle,
    node,
    ports,
    processes,
    reload,
    runs,
    sandboxes,
    sessions,
    snapshots,
    status_page,
)
from sandboxd.api.routes import exec as exec_route
from sandboxd.api.shortcut import Shortcut
from sandboxd.config import Config
from sandboxd.errors import BodyTooLarge, HttpError, SandboxdError, Unauthorized
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.reloading import Reloader

DESCRIPTION = """Disposable, isolated Linux sandboxes for rollout workers.

Every answer of 400 or more has the body
`{"error": {"code", "message", "cause", "retryable", "hint", "detail"}}`.
`cause` tells a trainer whose fault it was: `workload` (the program in the sandbox), `request` (this
request) or `node` (the machine). A command that fails is no error but a result."""


NO_HTTP: Final = {"text/plain": {"schema": {"type": "string"}}}
"""What is no HTTP request, or has a head of more than 64 KiB, the server refuses by itself, with a
400 that never reaches the application."""


class Application(FastAPI):
    """FastAPI, and before it what every request passes: the token, the size, the shortcut.

    Not as its middlewares: what FastAPI and Starlette do around those takes as long as they do.
    """

    doors: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.behind(scope, receive, send)
        else:
            scope["app"] = self
            await self.doors(scope, receive, send)

    async def behind(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI's own."""
        await super().__call__(scope, receive, send)


def create_app(
    config: Config,
    runtime: Runtime,
    *,
    token: str,
    ready_within_s: float = 0.0,
    reloader: Reloader | None = None,
) -> FastAPI:
    """The application; its lifespan starts and closes ``runtime``.

    Requests are taken once all sandboxes are known, or ``ready_within_s`` later. Without a
    ``reloader`` the configuration never changes.

    Raises ConfigError for an empty token: there is no open mode, on no address.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await runtime.start()
        await runtime.wait_ready(ready_within_s)
        try:
            yield
        finally:
            await runtime.close()

    app = Application(
        # A path with a slash too many is no route; a redirect would be an answer of another shape.
        redirect_slashes=False,
        title="sandboxd",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        # The interactive pages load their scripts from elsewhere, and could not send the token.
        docs_url=None,
        redoc_url=None,
    )
    app.state.runtime = runtime
    app.state.reloader = reloader or Reloader(runtime, lambda: config)
    exception_handlers.install(app)
    # In the order of how often they are asked: the router tries one after another.
    for resource in (
        exec_route,
        files,
        archives,
        processes,
        sessions,
        ports,
        sandboxes,
        lifecycle,
        egress,
        batch,
        snapshots,
        diffs,
        runs,
        health,
        images,
        node,
        eyes,
        reload,
        drain,
        status_page,
    ):
        app.include_router(resource.router)
    # The outermost is the last: nothing of a body is read before the token was right.
    limited = BodyLimit(Shortcut(app.behind), max_bytes=config.max_body_bytes)
    app.doors = BearerAuth(limited, token=token)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with what the middlewares add to every route."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    schema = {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            lift_definitions(document, operation)
            kinds = [SandboxdError, HttpError]
            if path not in OPEN_PATHS:
                operation["security"] = [{"bearer": []}]
                kinds.append(Unauthorized)
            if "requestBody" in operation:
                kinds.append(BodyTooLarge)
            for status, answer in documented(*kinds).items():
                answer.pop("model")
                answer["content"]["application/json"] |= schema
                operation["responses"].setdefault(str(status), answer)
            operation["responses"]["400"]["content"] |= NO_HTTP
    app.openapi_schema = document
    return document
