"""Runs: set up, kept alive, looked at, ended as a whole. A run's name may contain slashes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, failure_answer, timestamp
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas.runs import RunAnswer, RunBody, RunEndedAnswer, RunList
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.runs import RunView

router = APIRouter(prefix="/v1/runs", tags=["runs"])

Name = Annotated[str, Path(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$")]

_ERRORS = (errors.RequestError, errors.NodeUnavailable)


def _answer(view: RunView) -> dict[str, Any]:
    row = asdict(view)
    for name in ("created_at", "expires_at"):
        row[name] = None if row[name] is None else timestamp(row[name])
    return row


@router.get("", response_model=RunList, responses=documented(*_ERRORS))
async def list_runs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(max_length=255)] = "",
) -> Response:
    """Runs that were set up, that have sandboxes or snapshots, or that were ended lately."""
    runtime: Runtime = request.app.state.runtime
    views = [view for view in runtime.runs.views() if view.name > after]
    page = views[:limit]
    more = len(views) > len(page)
    rows = [_answer(view) for view in page]
    return JsonAnswer({"runs": rows, "next": page[-1].name if more else None})


@router.post(
    "/{run:path}/heartbeat",
    response_model=RunAnswer,
    responses=documented(*_ERRORS, errors.RunNotFound, errors.RunEnded),
)
async def heartbeat(request: Request, run: Name) -> Response:
    """The run's controller lives: its lease begins anew."""
    runtime: Runtime = request.app.state.runtime
    return JsonAnswer(_answer(await runtime.runs.heartbeat(run)))


@router.put(
    "/{run:path}",
    response_model=RunAnswer,
    openapi_extra=json_body(RunBody, required=False),
    responses=documented(*_ERRORS, errors.RunEnded, errors.QuotaExceeded, errors.RouteNotFound),
)
async def put(request: Request, run: Name) -> Response:
    """Set a run up, or set it up anew: a lease that heartbeats renew, and quotas. What it has
    already stays. A run that nobody sets up has neither."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(RunBody, request, RunBody())
    view = await runtime.runs.put(
        run,
        lease_s=body.lease_s,
        max_sandboxes=body.max_sandboxes,
        max_creates_per_s=body.max_creates_per_s,
    )
    return JsonAnswer(_answer(view))


@router.get(
    "/{run:path}", response_model=RunAnswer, responses=documented(*_ERRORS, errors.RunNotFound)
)
async def get(request: Request, run: Name) -> Response:
    """One run."""
    runtime: Runtime = request.app.state.runtime
    return JsonAnswer(_answer(runtime.runs.view(run)))


@router.delete(
    "/{run:path}",
    response_model=RunEndedAnswer,
    # What is no name for a path (it has a newline) comes to no route.
    responses=documented(*_ERRORS, errors.QuotaExceeded, errors.RouteNotFound),
)
async def end(
    request: Request,
    run: Name,
    within_s: Annotated[
        float, Query(gt=0, le=600, description="Answers by then, whatever is not done yet")
    ] = 60.0,
) -> Response:
    """End all that a run has: sandboxes (those being made too) with their processes, snapshots,
    creates that wait. For a while no create of it is let in (`run-ended`). Idempotent."""
    runtime: Runtime = request.app.state.runtime
    done = await runtime.runs.end(run, within_s)
    return JsonAnswer(
        {
            "run": run,
            "deleted": done.sandboxes.deleted,
            "pending": done.sandboxes.pending,
            "failed": [
                {"id": key, **failure_answer(why)} for key, why in done.sandboxes.failed.items()
            ],
            "snapshots": done.snapshots,
            "refused": done.refused,
        }
    )
