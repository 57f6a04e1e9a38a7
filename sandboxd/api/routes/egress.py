"""A sandbox's egress log: where it went, where it was stopped, which names it asked for."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, timestamp
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas.network import EgressCounts, EgressList
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])

LIMIT_MAX: Final = 512


@router.get(
    "/{sandbox_id}/egress",
    response_model=EgressList,
    responses=documented(
        errors.RequestError,
        errors.SandboxNotFound,
        errors.NetworkUnavailable,
        errors.NodeError,
        errors.NodeUnavailable,
    ),
)
async def egress(
    *,
    request: Request,
    sandbox_id: str,
    after: Annotated[int, Query(ge=0, description="The ``next`` of an earlier answer")] = 0,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT_MAX,
) -> Response:
    """Connections that were begun, allowed and denied, and DNS queries, counted by destination.
    Empty for a sandbox without a network."""
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    answer = await runtime.launcher.call("egress", sandbox=sandbox.id, after=after, limit=limit)
    entries = [_entry(one) for one in answer.ok["entries"]]
    counts = answer.ok["counts"]
    return JsonAnswer(
        {
            "entries": entries,
            "counts": {name: int(counts.get(name, 0)) for name in EgressCounts.model_fields},
            "next": entries[-1]["seq"] if entries else after,
            "more": bool(answer.ok["more"]),
        }
    )


def _entry(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "first_at": timestamp(row["first_at"]),
        "last_at": timestamp(row["last_at"]),
    }
