"""Many sandboxes, or many commands, in one request: each with its own result or error.

A bounded number of them is under way at a time, so that one large batch leaves room for others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, exec_answer
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.disconnect import ClientWatch, unless_gone
from sandboxd.api.exception_handlers import documented
from sandboxd.api.routes.exec import exec_request
from sandboxd.api.routes.sandboxes import asked_for, inline_files, to_answer
from sandboxd.api.schemas.batch import (
    BatchExecBody,
    CreateBatchAnswer,
    CreateBatchBody,
    ExecBatchAnswer,
    ExecBatchBody,
)
from sandboxd.errors import SandboxdError
from sandboxd.runtime import exclusive
from sandboxd.runtime.exec import Exec
from sandboxd.runtime.frames import error_fields
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.sandbox import SandboxView

router = APIRouter(prefix="/v1", tags=["batch"])

CREATES_AT_ONCE: Final = 32
EXECS_AT_ONCE: Final = 128


class _Batch:
    """Runs items, a bounded number at a time; an error of ours becomes the item's."""

    def __init__(self, at_once: int) -> None:
        self._gate = asyncio.Semaphore(at_once)

    async def run(
        self, count: int, name: str, work: Callable[[int], Awaitable[Any]]
    ) -> list[dict[str, Any]]:
        """``{"index", name, "error"}`` for each, in order. Cancelled, it cancels them all."""

        async def one(index: int) -> dict[str, Any]:
            async with self._gate:
                try:
                    return {"index": index, name: await work(index), "error": None}
                except SandboxdError as error:
                    return {"index": index, name: None, "error": error_fields(error)}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(count)]
        return [task.result() for task in tasks]


@router.post(
    "/sandboxes:batch",
    response_model=CreateBatchAnswer,
    openapi_extra=json_body(CreateBatchBody),
    responses=documented(errors.RequestError, errors.NodeUnavailable),
)
async def create_many(
    request: Request,
    idempotency_key: Annotated[
        str | None, Header(min_length=1, max_length=240, pattern=r"^[\x21-\x7e]+$")
    ] = None,
) -> Response:
    """Make several sandboxes alike. Each has its own result; what could not be made is told and
    undoes nothing. If the client goes away first, none is kept. With an Idempotency-Key each has
    one of its own made from it, so the same request again makes only what is missing."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(CreateBatchBody, request)
    spec, program = await asked_for(runtime, body.sandbox)
    files = inline_files(body.sandbox)
    made: list[SandboxView] = []

    async def make(index: int) -> dict[str, Any]:
        key = f"{idempotency_key}#{index}" if idempotency_key else None
        view = await runtime.create(
            spec, key, files=files, program=program, wait_s=body.sandbox.wait_s
        )
        made.append(view)
        return to_answer(runtime, view)

    try:
        making = _Batch(CREATES_AT_ONCE).run(body.count, "sandbox", make)
        items = await unless_gone(request.receive, making)
    except BaseException:
        for view in made:
            runtime.spawn(runtime.delete(view.id))
        raise
    created = sum(item["sandbox"] is not None for item in items)
    return JsonAnswer({"items": items, "created": created})


@router.post(
    "/execs:batch",
    response_model=ExecBatchAnswer,
    openapi_extra=json_body(ExecBatchBody),
    responses=documented(errors.RequestError, errors.NodeUnavailable),
)
async def exec_many(request: Request) -> Response:
    """Run commands in any sandboxes of this node, each with its own result or error; answers when
    the last has ended. A client that goes away ends all of them but the detached ones."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(ExecBatchBody, request)
    running: set[Exec] = set()
    gone = False

    def cancel() -> None:
        nonlocal gone
        gone = True
        for one in list(running):
            one.cancel()

    async def run(index: int) -> dict[str, Any]:
        asked: BatchExecBody = body.execs[index]
        sandbox = runtime.find(asked.sandbox)
        wanted = exec_request(asked, runtime.config)
        one, done = await exclusive.start(runtime, sandbox, wanted, exec_id=asked.exec_id)
        if not wanted.detach:
            running.add(one)
            if gone:
                one.cancel()
        try:
            return exec_answer(await asyncio.shield(done), asked.encoding)
        finally:
            running.discard(one)

    with ClientWatch(request.receive, cancel):
        try:
            items = await _Batch(EXECS_AT_ONCE).run(len(body.execs), "result", run)
        except asyncio.CancelledError:
            cancel()
            raise
    return JsonAnswer({"items": items})
