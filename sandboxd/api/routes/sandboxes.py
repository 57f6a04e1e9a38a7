"""Sandboxes: create, list, look at, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, sandbox_answer
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas import CreateBody, SandboxAnswer, SandboxList
from sandboxd.model import SandboxState
from sandboxd.runtime.manager import Runtime, check_allowed
from sandboxd.runtime.sandbox import Sandbox, SandboxView

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])


def _answer(runtime: Runtime, view: SandboxView) -> dict[str, Any]:
    return sandbox_answer(view, node=runtime.config.node_name, enforcement=runtime.enforcement)


@router.post(
    "",
    status_code=201,
    response_model=SandboxAnswer,
    openapi_extra=json_body(CreateBody),
    responses=documented(
        errors.RequestError,
        errors.ImageNotFound,
        errors.ImageInvalid,
        errors.IdempotencyConflict,
        errors.NodeOverloaded,
        errors.NodeUnavailable,
        errors.ImageUnavailable,
        errors.SandboxSetupError,
    ),
)
async def create(
    request: Request,
    idempotency_key: Annotated[
        str | None, Header(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")
    ] = None,
) -> Response:
    """Make a sandbox. With an Idempotency-Key, the same request again gets the same answer."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(CreateBody, request)
    spec = body.to_spec(runtime.config)
    check_allowed(spec, runtime.config)
    view = await runtime.create(spec, idempotency_key)
    location = {"Location": f"/v1/sandboxes/{view.id}"}
    return JsonAnswer(_answer(runtime, view), 201, location)


@router.get(
    "",
    response_model=SandboxList,
    responses=documented(errors.RequestError, errors.NodeUnavailable),
)
async def list_sandboxes(
    *,
    request: Request,
    run: Annotated[str | None, Query(max_length=255)] = None,
    state: SandboxState | None = None,
    label: Annotated[
        list[str] | None,
        Query(max_length=16, description="`key=value`, or `key` for any value; all must match"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Sandboxes in the order of their ids, those that match all that is asked for."""
    runtime: Runtime = request.app.state.runtime
    wanted = [one.partition("=") for one in label or ()]

    def matches(sandbox: Sandbox) -> bool:
        labels = sandbox.spec.labels
        return (
            sandbox.id > after
            and (run is None or sandbox.spec.run == run)
            and (state is None or sandbox.state is state)
            and all(
                key in labels and (not equals or labels[key] == value)
                for key, equals, value in wanted
            )
        )

    page: list[Sandbox] = []
    more = False
    for sandbox in filter(matches, runtime.sandboxes()):
        if len(page) == limit:
            more = True
            break
        page.append(sandbox)
    return JsonAnswer(
        {
            "sandboxes": [_answer(runtime, sandbox.view()) for sandbox in page],
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
    return JsonAnswer(_answer(runtime, runtime.find(sandbox_id).view()))


@router.delete("/{sandbox_id}", status_code=204, responses=documented(errors.NodeUnavailable))
async def delete(request: Request, sandbox_id: str) -> Response:
    """Delete a sandbox; one that is not there is deleted already. When this answers, no process of
    it lives."""
    runtime: Runtime = request.app.state.runtime
    await runtime.delete(sandbox_id)
    return Response(status_code=204)
