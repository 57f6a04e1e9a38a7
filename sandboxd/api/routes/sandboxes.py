"""Sandboxes: create, list, look at, delete one or many."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, failure_answer, sandbox_answer
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.disconnect import unless_gone
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas.lifecycle import DeletedAnswer
from sandboxd.api.schemas.sandboxes import CreateBody, SandboxAnswer, SandboxList
from sandboxd.cpu_list import cpu_list
from sandboxd.errors import RequestError
from sandboxd.model import InlineFile, SandboxSpec, SandboxState
from sandboxd.runtime import lifecycle
from sandboxd.runtime.bounds import check_allowed
from sandboxd.runtime.limits import check_enforceable
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.sandbox import Sandbox, SandboxView

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])

IDEMPOTENCY_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")


Run = Annotated[str | None, Query(max_length=255)]
Labels = Annotated[
    list[str] | None,
    Query(max_length=16, description="`key=value`, or `key` for any value; all must match"),
]


def to_answer(runtime: Runtime, view: SandboxView) -> dict[str, Any]:
    """A ``SandboxAnswer`` of this node."""
    return sandbox_answer(view, node=runtime.config.node_name, enforcement=runtime.enforcement)


def _filter(run: str | None, labels: list[str] | None) -> Callable[[Sandbox], bool]:
    wanted = [one.partition("=") for one in labels or ()]

    def matches(sandbox: Sandbox) -> bool:
        has = sandbox.spec.labels
        return (run is None or sandbox.spec.run == run) and all(
            key in has and (not equals or has[key] == value) for key, equals, value in wanted
        )

    return matches


def inline_files(body: CreateBody) -> list[InlineFile]:
    """What a sandbox is made with. Raises RequestError for what is no base64."""
    try:
        return [file.to_file() for file in body.files]
    except ValueError as error:
        raise RequestError(f"files: {error}") from error


async def asked_for(runtime: Runtime, body: CreateBody) -> tuple[SandboxSpec, bytes]:
    """What a body asks for, and its own seccomp program. Raises RequestError for what this node
    does not allow, CpusetUnavailable, LimitUnenforceable, SeccompNotFound, SeccompInvalid."""
    spec = body.to_spec(runtime.config)
    check_allowed(spec, runtime.config)
    most = runtime.config.max_limits.cpuset
    if most and spec.limits.cpuset == most and (here := cpu_list(runtime.cpus_allowed)):
        spec = replace(spec, limits=replace(spec.limits, cpuset=here))
    check_enforceable(spec.limits, runtime.enforcement, runtime.cpus)
    if body.seccomp is None:
        return spec, b""
    profile = await runtime.profiles.find(body.seccomp)
    return replace(spec, seccomp=profile.choice), profile.program


@router.post(
    "",
    status_code=201,
    response_model=SandboxAnswer,
    openapi_extra=json_body(CreateBody),
    responses=documented(
        errors.RequestError,
        errors.ImageNotFound,
        errors.ImageInvalid,
        errors.SnapshotNotFound,
        errors.IdempotencyConflict,
        errors.CpusetUnavailable,
        errors.LimitUnenforceable,
        errors.NetworkNotAllowed,
        errors.NetworkUnavailable,
        errors.MountNotAllowed,
        errors.MountSourceNotFound,
        errors.MountSourceInvalid,
        errors.MountTargetInvalid,
        errors.NodeOverloaded,
        errors.QuotaExceeded,
        errors.RunEnded,
        errors.NodeDraining,
        errors.NodeUnavailable,
        errors.ImageUnavailable,
        errors.ImageUnverified,
        errors.SandboxSetupError,
        errors.SeccompInvalid,
        errors.SeccompNotFound,
        # Of the sandbox to copy from.
        errors.SandboxNotFound,
        errors.SandboxBusy,
        errors.SandboxExclusive,
        errors.ProcessesStuck,
        errors.FreezeUnsupported,
        errors.SymlinkInPath,
        errors.TreeTooLarge,
        errors.FileChanged,
        # Of the files that it is made with.
        errors.UserNotFound,
        errors.UserNotMapped,
        errors.FileError,
        errors.FileNotFound,
        errors.FileAccessDenied,
        errors.NotARegularFile,
        errors.DiskFull,
        errors.SandboxDead,
        errors.SandboxLost,
        errors.OomKilled,
        errors.PidsExhausted,
    ),
)
async def create(
    request: Request,
    idempotency_key: Annotated[str | None, Header(pattern=f"^{IDEMPOTENCY_KEY.pattern}$")] = None,
) -> Response:
    """Make a sandbox. With an Idempotency-Key, the same request again gets the same answer. If the
    client goes away before that, it is not kept."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(CreateBody, request)
    spec, program = await asked_for(runtime, body)
    making = runtime.create(
        spec, idempotency_key, files=inline_files(body), program=program, wait_s=body.wait_s
    )
    view = await unless_gone(request.receive, making)
    location = {"Location": f"/v1/sandboxes/{view.id}"}
    return JsonAnswer(to_answer(runtime, view), 201, location)


@router.get(
    "",
    response_model=SandboxList,
    responses=documented(errors.RequestError, errors.NodeUnavailable),
)
async def list_sandboxes(
    *,
    request: Request,
    run: Run = None,
    state: SandboxState | None = None,
    label: Labels = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Sandboxes in the order of their ids, those that match all that is asked for."""
    runtime: Runtime = request.app.state.runtime
    matches = _filter(run, label)
    page: list[Sandbox] = []
    more = False
    for sandbox in filter(matches, runtime.sandboxes()):
        if sandbox.id <= after or (state is not None and sandbox.state is not state):
            continue
        if len(page) == limit:
            more = True
            break
        page.append(sandbox)
    return JsonAnswer(
        {
            "sandboxes": [to_answer(runtime, sandbox.view()) for sandbox in page],
            "next": page[-1].id if more else None,
        }
    )


@router.get(
    "/{sandbox_id}",
    response_model=SandboxAnswer,
    responses=documented(errors.SandboxNotFound, errors.NodeUnavailable),
)
async def get(request: Request, sandbox_id: str) -> Response:
    """One sandbox."""
    runtime: Runtime = request.app.state.runtime
    return JsonAnswer(to_answer(runtime, runtime.find(sandbox_id).view()))


@router.delete("/{sandbox_id}", status_code=204, responses=documented(errors.NodeUnavailable))
async def delete(request: Request, sandbox_id: str) -> Response:
    """Delete a sandbox; one that is not there is deleted already. When this answers, no process of
    it lives."""
    runtime: Runtime = request.app.state.runtime
    await runtime.delete(sandbox_id)
    return Response(status_code=204)


@router.delete(
    "",
    response_model=DeletedAnswer,
    responses=documented(errors.RequestError, errors.NodeUnavailable),
)
async def delete_many(
    *,
    request: Request,
    run: Run = None,
    label: Labels = None,
    within_s: Annotated[
        float, Query(gt=0, le=600, description="Answers by then, whatever is not done yet")
    ] = 60.0,
) -> Response:
    """Delete every sandbox of a run, or with these labels, or both. At least one must be given."""
    runtime: Runtime = request.app.state.runtime
    if run is None and not label:
        raise RequestError("neither run nor label is given: that would be every sandbox")
    chosen = filter(_filter(run, label), runtime.sandboxes())
    done = await lifecycle.delete_all(runtime, chosen, within_s)
    return JsonAnswer(
        {
            "deleted": done.deleted,
            "pending": done.pending,
            "failed": [{"id": key, **failure_answer(why)} for key, why in done.failed.items()],
        }
    )
