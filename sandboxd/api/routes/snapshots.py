"""Reset, snapshots, rollback. A fork is a create with ``snapshot``."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, sandbox_answer, timestamp
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.exception_handlers import documented
from sandboxd.api.file_streams import OCTETS, StreamAnswer
from sandboxd.api.schemas.snapshots import (
    ResetAnswer,
    ResetBody,
    RollbackBody,
    SnapshotAnswer,
    SnapshotBody,
    SnapshotList,
    SnapshotTaken,
)
from sandboxd.runtime import exports, snapshots
from sandboxd.runtime.bounds import check_ttl
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.snapshots import SnapshotRecord

router = APIRouter(prefix="/v1", tags=["snapshots"])

_CHANGED = (
    errors.RequestError,
    errors.SandboxNotFound,
    errors.SandboxBusy,
    errors.SandboxPaused,
    errors.SandboxExclusive,
    errors.SandboxDead,
    errors.SandboxLost,
    errors.OomKilled,
    errors.DiskFull,
    errors.NodeError,
    errors.NodeUnavailable,
    errors.ImageUnavailable,
    errors.ImageUnverified,
    errors.SandboxSetupError,
)


def _answer(record: SnapshotRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "sandbox": record.sandbox,
        "run": record.run,
        "name": record.name,
        "image": record.image,
        "image_key": record.image_key,
        "bytes": record.bytes,
        "created_at": timestamp(record.created_at),
        "expires_at": timestamp(record.expires_at),
    }


async def _reset(request: Request, sandbox_id: str, snapshot_id: str | None) -> Response:
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    snapshot = runtime.snapshots.find(snapshot_id) if snapshot_id else None
    began = time.perf_counter()
    view, phases = await snapshots.reset(runtime, sandbox, snapshot)
    phases["total"] = round((time.perf_counter() - began) * 1000, 3)
    node = runtime.config.node_name
    body = sandbox_answer(view, node=node, enforcement=runtime.enforcement)
    return JsonAnswer({**body, "phases_ms": phases, "reset_ms": phases})


@router.post(
    "/sandboxes/{sandbox_id}/reset",
    response_model=ResetAnswer,
    openapi_extra=json_body(ResetBody, required=False),
    responses=documented(errors.SnapshotNotFound, errors.ImageNotFound, *_CHANGED),
)
async def reset(request: Request, sandbox_id: str) -> Response:
    """Begin anew: all processes killed, the root back to the image or to a snapshot; same id,
    limits and time of life. What it costs does not depend on what was written."""
    body = await parse(ResetBody, request, default=ResetBody())
    return await _reset(request, sandbox_id, body.snapshot)


@router.post(
    "/sandboxes/{sandbox_id}/rollback",
    response_model=ResetAnswer,
    openapi_extra=json_body(RollbackBody),
    responses=documented(errors.SnapshotNotFound, errors.ImageNotFound, *_CHANGED),
)
async def rollback(request: Request, sandbox_id: str) -> Response:
    """A reset to a snapshot, of this sandbox or of another one."""
    body = await parse(RollbackBody, request)
    return await _reset(request, sandbox_id, body.snapshot)


@router.post(
    "/sandboxes/{sandbox_id}/snapshots",
    status_code=201,
    response_model=SnapshotTaken,
    openapi_extra=json_body(SnapshotBody, required=False),
    responses=documented(
        errors.SandboxRunning, errors.SnapshotTooDeep, errors.CheckpointUnsupported, *_CHANGED
    ),
)
async def take(request: Request, sandbox_id: str) -> Response:
    """Freeze what the sandbox has written, without copying it where no process lives in it."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(SnapshotBody, request, default=SnapshotBody())
    sandbox = runtime.find(sandbox_id)
    if body.processes:
        raise errors.CheckpointUnsupported(
            "processes cannot be part of a snapshot here",
            hint="on_running says what becomes of them; `checkpoint` of the node's features, why",
        )
    ttl_s = sandbox.spec.ttl_s if body.ttl_s is None else body.ttl_s
    check_ttl(ttl_s, runtime.config)
    taken = await runtime.snapshots.take(
        sandbox, name=body.name, on_running=body.on_running, ttl_s=ttl_s
    )
    answer = {**_answer(taken.record), "how": taken.how, "frozen_ms": taken.frozen_ms}
    return JsonAnswer(answer, 201, {"Location": f"/v1/snapshots/{taken.record.id}"})


@router.get(
    "/snapshots",
    response_model=SnapshotList,
    responses=documented(errors.RequestError),
)
async def list_snapshots(
    *,
    request: Request,
    run: Annotated[str | None, Query(max_length=255)] = None,
    sandbox: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """All of the node, or those of a run or of a sandbox, in the order of their ids."""
    runtime: Runtime = request.app.state.runtime
    found = [
        _answer(record)
        for record in runtime.snapshots
        if (run is None or record.run == run) and (sandbox is None or record.sandbox == sandbox)
    ]
    return JsonAnswer({"snapshots": found})


@router.get(
    "/snapshots/{snapshot_id}",
    response_model=SnapshotAnswer,
    responses=documented(errors.SnapshotNotFound),
)
async def get(request: Request, snapshot_id: str) -> Response:
    runtime: Runtime = request.app.state.runtime
    return JsonAnswer(_answer(runtime.snapshots.find(snapshot_id)))


@router.post(
    "/snapshots/{snapshot_id}/export",
    response_class=Response,
    responses={
        200: {
            "description": "A SIF with a delta",
            "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}},
        },
        **documented(
            errors.SnapshotNotFound,
            errors.TreeTooLarge,
            errors.DiffUnspeakable,
            errors.ExportFailed,
            errors.ImageNotFound,
            errors.ImageInvalid,
            errors.ImageUnavailable,
            errors.ImageUnverified,
            errors.NodeError,
            errors.NodeUnavailable,
        ),
    },
)
async def export(request: Request, snapshot_id: str) -> Response:
    """A snapshot as a delta SIF for other nodes: what is to be laid over the image's own files.
    `sif-tools flatten` makes one SIF of those and this. Sockets are left out, times are in whole
    seconds, POSIX ACLs are not kept. One at a time is made."""
    runtime: Runtime = request.app.state.runtime
    made = await exports.delta_sif(runtime, runtime.snapshots.find(snapshot_id))
    return StreamAnswer(made, made.rest(), headers={"content-length": str(made.size_bytes)})


@router.delete(
    "/snapshots/{snapshot_id}",
    status_code=204,
    responses=documented(errors.NodeUnavailable),
)
async def delete(request: Request, snapshot_id: str) -> Response:
    """Let go of a snapshot. Sandboxes that stand on it live on; deleting twice is no error."""
    runtime: Runtime = request.app.state.runtime
    await runtime.snapshots.delete(snapshot_id)
    return Response(status_code=204)
