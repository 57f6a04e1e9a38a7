"""What is done to a sandbox between its making and its end: renew, pause, resume, stats, events."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, sandbox_answer, timestamp
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas.lifecycle import EventList, RenewBody, StatsAnswer
from sandboxd.api.schemas.sandboxes import SandboxAnswer
from sandboxd.model import Limits
from sandboxd.runtime import lifecycle
from sandboxd.runtime.bounds import check_ttl
from sandboxd.runtime.events import EVENTS_MAX
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.sandbox import SandboxView

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])

_GONE = (
    errors.SandboxNotFound,
    errors.SandboxDead,
    errors.SandboxLost,
    errors.SandboxExclusive,
    errors.ProcessesStuck,
    errors.FreezeUnsupported,
    errors.OomKilled,
    errors.NodeError,
    errors.NodeUnavailable,
)


def _answer(runtime: Runtime, view: SandboxView) -> Response:
    node = runtime.config.node_name
    return JsonAnswer(sandbox_answer(view, node=node, enforcement=runtime.enforcement))


@router.post(
    "/{sandbox_id}/renew",
    response_model=SandboxAnswer,
    openapi_extra=json_body(RenewBody),
    responses=documented(errors.RequestError, errors.SandboxNotFound, errors.NodeUnavailable),
)
async def renew(request: Request, sandbox_id: str) -> Response:
    """Let a sandbox live for ``ttl_s`` from now on, be that more or less than it had."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(RenewBody, request)
    sandbox = runtime.find(sandbox_id)
    ttl_s = sandbox.spec.ttl_s if body.ttl_s is None else body.ttl_s
    check_ttl(ttl_s, runtime.config)
    return _answer(runtime, await lifecycle.renew(runtime, sandbox, ttl_s))


@router.post(
    "/{sandbox_id}/pause",
    response_model=SandboxAnswer,
    responses=documented(errors.SandboxPaused, *_GONE),
)
async def pause(request: Request, sandbox_id: str) -> Response:
    """Freeze every process of a sandbox. Its files can be read and written, nothing can be started
    (``sandbox-paused``). Clocks go on: a command whose time is up is killed all the same."""
    runtime: Runtime = request.app.state.runtime
    return _answer(runtime, await lifecycle.pause(runtime, runtime.find(sandbox_id)))


@router.post("/{sandbox_id}/resume", response_model=SandboxAnswer, responses=documented(*_GONE))
async def resume(request: Request, sandbox_id: str) -> Response:
    """Let the processes of a paused sandbox go on."""
    runtime: Runtime = request.app.state.runtime
    return _answer(runtime, await lifecycle.resume(runtime, runtime.find(sandbox_id)))


@router.get(
    "/{sandbox_id}/stats",
    response_model=StatsAnswer,
    responses=documented(errors.SandboxNotFound, errors.NodeError, errors.NodeUnavailable),
)
async def stats(request: Request, sandbox_id: str) -> Response:
    """What a sandbox uses now, and has used."""
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    figures = await lifecycle.usage(runtime, sandbox)
    return JsonAnswer(_stats(sandbox.id, sandbox.spec.limits, figures))


@router.get(
    "/{sandbox_id}/events",
    response_model=EventList,
    responses=documented(errors.RequestError, errors.SandboxNotFound, errors.NodeUnavailable),
)
async def events(
    *,
    request: Request,
    sandbox_id: str,
    after: Annotated[int, Query(ge=0, description="The ``next`` of an earlier answer")] = 0,
    limit: Annotated[int, Query(ge=1, le=EVENTS_MAX)] = EVENTS_MAX,
) -> Response:
    """What became of a sandbox: the last events, the oldest first."""
    runtime: Runtime = request.app.state.runtime
    found = runtime.find(sandbox_id).events.after(after, limit)
    rows = [
        {
            "seq": event.seq,
            "at": timestamp(event.at),
            "kind": event.kind,
            "message": event.message,
            "detail": event.detail,
        }
        for event in found
    ]
    return JsonAnswer({"events": rows, "next": found[-1].seq if found else after})


def _stats(sandbox_id: str, limits: Limits, figures: dict[str, Any]) -> dict[str, Any]:
    def seconds(name: str) -> float | None:
        value = figures.get(name)
        return None if value is None else value / 1e6

    return {
        "id": sandbox_id,
        "at": timestamp(time.time()),
        "cpu": {
            "usage_s": seconds("cpu_usage_usec"),
            "user_s": seconds("cpu_user_usec"),
            "system_s": seconds("cpu_system_usec"),
            "periods": figures.get("cpu_periods"),
            "throttled_periods": figures.get("cpu_throttled_periods"),
            "throttled_s": seconds("cpu_throttled_usec"),
        },
        "memory": {
            "used_bytes": figures.get("memory_bytes"),
            "peak_bytes": figures.get("memory_peak_bytes"),
            "limit_bytes": figures.get("memory_limit_bytes")
            or (limits.memory_mb + limits.disk_mb) << 20,
            "oom_kills": figures.get("oom_kills"),
        },
        "pids": {
            "count": figures.get("pids"),
            "limit": limits.pids,
            "refused": figures.get("pids_refused"),
        },
        "disk": {
            "used_bytes": figures.get("disk_used_bytes"),
            "size_bytes": figures.get("disk_bytes"),
            "used_inodes": figures.get("inodes_used"),
            "inodes": figures.get("inodes"),
        },
        "io": {
            "read_bytes": figures.get("io_read_bytes"),
            "written_bytes": figures.get("io_written_bytes"),
        },
    }
