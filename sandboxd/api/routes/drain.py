"""Emptying a node, and taking sandboxes on again."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, timestamp
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas.runs import DrainAnswer, DrainBody
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1/node", tags=["node"])


def drain_state(runtime: Runtime) -> dict[str, Any]:
    """A ``DrainState``."""
    row = runtime.drain.to_json()
    for name in ("since", "deadline", "job_end"):
        row[name] = None if row[name] is None else timestamp(row[name])
    return row


def _answer(runtime: Runtime) -> Response:
    return JsonAnswer({**drain_state(runtime), "sandboxes": len(runtime.table)})


@router.post(
    "/drain",
    response_model=DrainAnswer,
    openapi_extra=json_body(DrainBody, required=False),
    responses=documented(errors.RequestError, errors.NodeUnavailable),
)
async def drain(request: Request) -> Response:
    """Take no more sandboxes on (`node-draining`); those that are there go on, until the deadline
    if one is given. It outlives the daemon."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(DrainBody, request, DrainBody())
    await runtime.drain.begin(body.deadline_s)
    return _answer(runtime)


@router.post(
    "/undrain",
    response_model=DrainAnswer,
    responses=documented(errors.NodeUnavailable),
)
async def undrain(request: Request) -> Response:
    """Take sandboxes on again."""
    runtime: Runtime = request.app.state.runtime
    await runtime.drain.end()
    return _answer(runtime)
