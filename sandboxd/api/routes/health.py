"""Liveness and readiness, the two routes without a token: they say nothing but yes or no."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sandboxd.api.answers import JsonAnswer
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas.node import HealthAnswer
from sandboxd.errors import NodeDraining, NodeUnavailable, NodeVersionMismatch
from sandboxd.runtime.manager import Runtime

router = APIRouter(tags=["health"])


@router.get("/healthz", response_model=HealthAnswer)
async def healthz() -> Response:
    """The daemon answers."""
    return JsonAnswer({"status": "ok"})


@router.get(
    "/readyz",
    response_model=HealthAnswer,
    responses=documented(NodeUnavailable, NodeVersionMismatch, NodeDraining),
)
async def readyz(request: Request) -> Response:
    """The launcher is connected and all its sandboxes are known: creating works."""
    runtime: Runtime = request.app.state.runtime
    if not runtime.ready:
        raise runtime.launcher.unavailable("the launcher is not connected")
    runtime.drain.check()
    return JsonAnswer({"status": "ok"})
