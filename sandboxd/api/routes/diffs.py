"""What changed: in a sandbox or a snapshot, since its image or another snapshot."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer
from sandboxd.api.exception_handlers import documented
from sandboxd.api.file_streams import StreamAnswer, pieces
from sandboxd.api.routes.archives import TAR
from sandboxd.api.schemas.diffs import DiffAnswer, diff_entry
from sandboxd.api.schemas.files import PathBase64, decode_path
from sandboxd.api.schemas.snapshots import SnapshotId
from sandboxd.runtime import diffs
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1", tags=["snapshots"])

CHANGES: Final = 10_000
CHANGES_MAX: Final = 100_000

Since = Annotated[
    SnapshotId | None, Query(description="A snapshot of the same image; else the image itself")
]
Limit = Annotated[int, Query(ge=1, le=CHANGES_MAX, description="Changes at most; not of a tar")]
After = Annotated[
    PathBase64 | None, Query(description="Only what follows this path: `next` of the page before")
]

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "What changed; with `Accept: application/x-tar` an OCI layer of it",
        "content": {TAR: {"schema": {"type": "string", "format": "binary"}}},
    }
}
_ERRORS: Final = (
    errors.RequestError,
    errors.SnapshotNotFound,
    errors.TreeTooLarge,
    errors.DiffUnspeakable,
    errors.FileChanged,
    errors.ImageNotFound,
    errors.ImageUnavailable,
    errors.NodeError,
    errors.NodeUnavailable,
)


async def _diff(
    request: Request, origin: diffs.Origin, since: str | None, limit: int, after: str | None
) -> Response:
    runtime: Runtime = request.app.state.runtime
    older = runtime.snapshots.find(since) if since else None
    if TAR in request.headers.get("accept", ""):
        stream = await diffs.tar(runtime, origin, older)
        return StreamAnswer(stream, pieces(stream), media_type=TAR)
    start = None if after is None else decode_path(after)
    found, more = await diffs.entries(runtime, origin, older, limit=limit, after=start)
    last = base64.urlsafe_b64encode(found[-1].path).decode() if found and more else None
    body = {"changes": [diff_entry(one) for one in found], "more": more, "next": last}
    return JsonAnswer(body)


@router.get(
    "/sandboxes/{sandbox_id}/diff",
    response_model=DiffAnswer,
    responses={
        **_ANSWERS,
        **documented(
            *_ERRORS,
            errors.SandboxNotFound,
            errors.SandboxBusy,
            errors.SandboxExclusive,
            errors.SandboxLost,
            errors.ProcessesStuck,
            errors.FreezeUnsupported,
        ),
    },
)
async def diff_sandbox(
    *,
    request: Request,
    sandbox_id: str,
    since: Since = None,
    limit: Limit = CHANGES,
    after_base64: After = None,
) -> Response:
    """What the sandbox has that its image, or a snapshot, has not, and the other way round.

    A directory that is gone is told without what was in it; one that is new, with all that is.
    What was written and is as it was before is no change; times are not compared. The list is of
    one moment: the sandbox's processes are frozen while it is made, pages are of a moment each. A
    tar is told file by file, and breaks off at one that shrinks meanwhile; for one moment's, take
    that of a snapshot. In it sockets are left out."""
    runtime: Runtime = request.app.state.runtime
    return await _diff(request, runtime.find(sandbox_id), since, limit, after_base64)


@router.get(
    "/snapshots/{snapshot_id}/diff",
    response_model=DiffAnswer,
    responses={**_ANSWERS, **documented(*_ERRORS)},
)
async def diff_snapshot(
    *,
    request: Request,
    snapshot_id: str,
    since: Since = None,
    limit: Limit = CHANGES,
    after_base64: After = None,
) -> Response:
    """The same of a snapshot, which never changes."""
    runtime: Runtime = request.app.state.runtime
    return await _diff(request, runtime.snapshots.find(snapshot_id), since, limit, after_base64)
