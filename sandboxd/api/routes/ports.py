"""Programs that listen in a sandbox: HTTP, WebSockets and raw TCP to one of its ports."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Path, Request, Response, WebSocket
from starlette.websockets import WebSocketDisconnect

from sandboxd import errors
from sandboxd.api.exception_handlers import documented
from sandboxd.api.ports.http import PortAnswer
from sandboxd.api.ports.websocket import WebSocketProxy, end, refuse, tunnel
from sandboxd.errors import SandboxdError
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1/sandboxes", tags=["ports"])

Port = Annotated[int, Path(ge=1, le=65535, description="On which a program in it listens")]

PORT_ERRORS: Final = (
    errors.RequestError,
    errors.SandboxNotFound,
    errors.SandboxBusy,
    errors.SandboxPaused,
    errors.SandboxReset,
    errors.SandboxDead,
    errors.SandboxLost,
    errors.OomKilled,
    errors.PortClosed,
    errors.PortTimeout,
    errors.PortBroken,
    errors.TooManyPortConnections,
    errors.TooManyExecs,
    errors.NodeError,
    errors.NodeUnavailable,
    errors.NodeOverloaded,
)
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def http(request: Request, sandbox_id: str, port: Port, path: str) -> Response:
    """Ask the program at a port, and stream what it answers: any status, any body.

    An answer of ours has the header `X-Sandboxd-Error`, with the error's code. The token is not
    passed on; credentials for the program go into `X-Sandboxd-Authorization`. Redirects are not
    followed. A WebSocket is opened at the same path. Counts as use of the sandbox."""
    del path  # as it was sent, from the request itself
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    return PortAnswer(runtime.ports, sandbox, port, silence_s=runtime.config.port_answer_s)


for _method in METHODS:
    router.add_api_route(
        "/{sandbox_id}/ports/{port}/http/{path:path}",
        http,
        methods=[_method],
        response_class=Response,
        operation_id=f"port_http_{_method.lower()}",
        responses={
            "default": {"description": "What the program answers", "content": {"*/*": {}}},
            **documented(*PORT_ERRORS),
        },
    )


@router.websocket("/{sandbox_id}/ports/{port}/http/{path:path}")
async def websocket(client: WebSocket, sandbox_id: str, port: Port, path: str) -> None:
    """The same as a WebSocket."""
    del path
    runtime: Runtime = client.app.state.runtime
    config = runtime.config
    accepted = False
    try:
        async with runtime.ports.connection(runtime.find(sandbox_id), port) as connection:
            proxy = WebSocketProxy(client, connection, port, config.port_message_bytes)
            await proxy.shake_hands(config.port_answer_s)
            accepted = True
            await proxy.run(config.port_idle_s)
    except SandboxdError as error:
        await (end if accepted else refuse)(client, error)
    except WebSocketDisconnect:
        pass


@router.websocket("/{sandbox_id}/ports/{port}/tunnel")
async def raw(client: WebSocket, sandbox_id: str, port: Port) -> None:
    """Bytes to and from a port, as binary messages (``api/ports/websocket.py``)."""
    runtime: Runtime = client.app.state.runtime
    accepted = False
    try:
        async with runtime.ports.connection(runtime.find(sandbox_id), port) as connection:
            await client.accept()
            accepted = True
            await tunnel(client, connection, runtime.config.port_idle_s)
    except SandboxdError as error:
        await (end if accepted else refuse)(client, error)
    except WebSocketDisconnect:
        pass
