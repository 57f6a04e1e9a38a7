"""To watch a node by: its metrics, its events as they happen, its last hour."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, timestamp
from sandboxd.api.exception_handlers import documented
from sandboxd.api.ndjson import MEDIA_TYPE, FrameResponse
from sandboxd.api.schemas.eyes import EVENT_LINES, HistoryAnswer
from sandboxd.runtime.exposition import CONTENT_TYPE, exposition
from sandboxd.runtime.history import EVERY_S
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.node_events import Wanted

router = APIRouter(tags=["node"])

_METRICS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
_EVENTS: Final[dict[int | str, dict[str, Any]]] = {
    **documented(errors.RequestError, errors.StreamPositionLost, errors.NodeOverloaded),
    200: {"content": {MEDIA_TYPE: EVENT_LINES}},
}


@router.get("/metrics", response_class=Response, responses=_METRICS)
async def metrics(request: Request) -> Response:
    """For Prometheus, in its text format. The launcher's figures are left out while it does not
    answer; `sandboxd_node_up` is 0 then."""
    runtime: Runtime = request.app.state.runtime
    return Response(await exposition(runtime), headers={"Content-Type": CONTENT_TYPE})


@router.get("/v1/events", response_class=Response, responses=_EVENTS)
async def node_events(
    *,
    request: Request,
    after: Annotated[
        int, Query(ge=0, le=1 << 62, description="The `seq` that was seen last; 0: all there is")
    ] = 0,
    follow: Annotated[bool, Query(description="Stay, and tell what comes")] = False,
    sandbox: Annotated[str, Query(max_length=64)] = "",
    run: Annotated[str, Query(max_length=255)] = "",
    kind: Annotated[list[str] | None, Query(max_length=32)] = None,
) -> Response:
    """What became of the node and of all its sandboxes, the oldest first, one JSON object a line.

    Lines of `type` `event` have a `seq` that only grows, over restarts too; the last few thousand
    are kept. An event of kind `gap` says that what came between is lost. `heartbeat` lines tell how
    far was read, an `end` line that all was told: an answer that ends without one was cut off."""
    runtime: Runtime = request.app.state.runtime
    wanted = Wanted(sandbox, run, frozenset(kind or ()))
    reader = runtime.node_events.follow(after, wanted, stay=follow)
    return FrameResponse(reader, heartbeat_s=runtime.config.stream_heartbeat_s)


@router.get(
    "/v1/node/history", response_model=HistoryAnswer, responses=documented(errors.NodeUnavailable)
)
async def history(request: Request) -> Response:
    """The node's last hour, a point every ten seconds, the oldest first."""
    runtime: Runtime = request.app.state.runtime
    points = [{**asdict(one), "at": timestamp(one.at)} for one in runtime.history.points]
    return JsonAnswer({"every_s": EVERY_S, "points": points})
