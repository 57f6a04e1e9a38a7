"""Background processes: start, list, look at with their output, write to, signal, remove."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, output_answer, process_answer
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.exception_handlers import documented
from sandboxd.api.routes.exec import EXEC_ERRORS
from sandboxd.api.schemas.exec import TtyBody
from sandboxd.api.schemas.process import (
    ProcessAnswer,
    ProcessBody,
    ProcessList,
    ProcessOutputAnswer,
    SignalBody,
    StdinAnswer,
    StdinBody,
)
from sandboxd.errors import RequestError
from sandboxd.init.protocol import KillScope
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.processes import STREAMS, Process, ProcessTable

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/processes", tags=["processes"])

WAIT_MAX_S: Final = 60.0
STDIN_WAIT_S: Final = 30.0
PIECE_BYTES_MAX: Final = 8 * 1024 * 1024
LOOKUP_ERRORS: Final = (
    errors.SandboxNotFound,
    errors.ProcessNotFound,
    errors.NodeError,
    errors.NodeUnavailable,
)

Offset = Annotated[int | None, Query(ge=0, le=1 << 62)]
StdinTimeout = Annotated[float, Query(gt=0, le=600)]


def _table(request: Request, sandbox_id: str) -> ProcessTable:
    runtime: Runtime = request.app.state.runtime
    return runtime.processes.of(runtime.find(sandbox_id))


async def _find(request: Request, sandbox_id: str, process_id: str) -> tuple[ProcessTable, Process]:
    table = _table(request, sandbox_id)
    return table, await table.find(process_id)


@router.post(
    "",
    status_code=201,
    response_model=ProcessAnswer,
    openapi_extra=json_body(ProcessBody),
    responses=documented(*EXEC_ERRORS, errors.TooManyProcesses),
)
async def start(request: Request, sandbox_id: str) -> Response:
    """Start a command in the background. It lives until it ends, is removed, or its sandbox ends;
    its id is valid until it is removed, also after a restart of the daemon."""
    body = await parse(ProcessBody, request)
    process = await _table(request, sandbox_id).start(body.to_request(), name=body.name)
    location = {"Location": f"/v1/sandboxes/{sandbox_id}/processes/{process.id}"}
    return JsonAnswer(process_answer(process), 201, location)


@router.get("", response_model=ProcessList, responses=documented(*LOOKUP_ERRORS))
async def list_processes(request: Request, sandbox_id: str) -> Response:
    """All that were not removed, in the order in which they were started."""
    processes = await _table(request, sandbox_id).all()
    return JsonAnswer({"processes": [process_answer(one) for one in processes]})


@router.get(
    "/{process_id}",
    response_model=ProcessOutputAnswer,
    responses=documented(errors.RequestError, *LOOKUP_ERRORS),
)
async def get(
    *,
    request: Request,
    sandbox_id: str,
    process_id: str,
    wait_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S)] = 0,
    stdout_offset: Offset = None,
    stderr_offset: Offset = None,
    max_bytes: Annotated[int, Query(ge=4, le=PIECE_BYTES_MAX)] = 1024 * 1024,
    encoding: Literal["utf-8", "base64"] = "utf-8",
) -> Response:
    """One process, with its output from the offsets that are given. With `wait_s` it answers once
    there is output past one of them, or the process has ended, or the time is up.

    Offsets count from the stream's first byte. The newest bytes are kept; `lost_bytes` tells what
    is not there any more. In `utf-8` a character that is not complete yet is left for the next
    piece."""
    _, process = await _find(request, sandbox_id, process_id)
    asked = {
        name: offset
        for name, offset in zip(STREAMS, (stdout_offset, stderr_offset), strict=True)
        if offset is not None
    }
    if wait_s:
        await process.wait(asked, wait_s)
    # The state first: where it says that the process has ended, all it wrote is read below.
    answer = process_answer(process)
    for name in STREAMS:
        output = process.output(name, asked[name], max_bytes) if name in asked else None
        answer[name] = None if output is None else output_answer(output, encoding)
    return JsonAnswer(answer)


@router.post(
    "/{process_id}/stdin",
    response_model=StdinAnswer,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                **json_body(StdinBody)["requestBody"]["content"],
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        }
    },
    responses=documented(
        errors.RequestError, errors.StdinClosed, errors.StdinBlocked, *LOOKUP_ERRORS
    ),
)
async def write_stdin(
    request: Request,
    sandbox_id: str,
    process_id: str,
    *,
    eof: bool = False,
    timeout_s: StdinTimeout = STDIN_WAIT_S,
) -> Response:
    """Write to its stdin: the body's bytes as they are (`application/octet-stream`), or those of a
    JSON body. Answers once the pipe has taken all of it; what `stdin-blocked` had taken by then is
    in its detail. `eof` closes it afterwards."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "application/octet-stream":
        data = await request.body()
    else:
        body = await parse(StdinBody, request)
        eof = eof or body.eof
        try:
            data = body.content()
        except ValueError as error:
            raise RequestError(str(error)) from error
    table, process = await _find(request, sandbox_id, process_id)
    await process.write_stdin(data, timeout_s)
    if eof:
        await table.end_stdin(process, timeout_s)
    return JsonAnswer({"written_bytes": len(data)})


@router.delete(
    "/{process_id}/stdin",
    status_code=204,
    responses=documented(errors.StdinClosed, *LOOKUP_ERRORS),
)
async def close_stdin(request: Request, sandbox_id: str, process_id: str) -> Response:
    """End its input. One that is closed is closed."""
    table, process = await _find(request, sandbox_id, process_id)
    await table.end_stdin(process, STDIN_WAIT_S)
    return Response(status_code=204)


@router.post(
    "/{process_id}/signal",
    status_code=204,
    openapi_extra=json_body(SignalBody),
    responses=documented(errors.RequestError, errors.ProcessEnded, *LOOKUP_ERRORS),
)
async def send_signal(request: Request, sandbox_id: str, process_id: str) -> Response:
    """Send a signal to its main process, or to its whole tree: every process it has started that
    still lives, also when the main process has ended."""
    body = await parse(SignalBody, request)
    try:
        number = body.number()
    except ValueError as error:
        raise RequestError(str(error)) from error
    table, process = await _find(request, sandbox_id, process_id)
    scope = KillScope.KILL_MAIN if body.scope == "process" else KillScope.KILL_TREE
    await table.signal(process, number, scope)
    return Response(status_code=204)


@router.post(
    "/{process_id}/resize",
    status_code=204,
    openapi_extra=json_body(TtyBody),
    responses=documented(errors.RequestError, errors.NotATerminal, *LOOKUP_ERRORS),
)
async def resize(request: Request, sandbox_id: str, process_id: str) -> Response:
    """Set the size of its terminal; its foreground program is told by SIGWINCH."""
    body = await parse(TtyBody, request)
    _, process = await _find(request, sandbox_id, process_id)
    process.resize(body.cols, body.rows)
    return Response(status_code=204)


@router.delete("/{process_id}", status_code=204, responses=documented(*LOOKUP_ERRORS))
async def remove(request: Request, sandbox_id: str, process_id: str) -> Response:
    """Kill all of its tree and forget it with its output. When this answers, none of it lives."""
    table = _table(request, sandbox_id)
    await table.remove(await table.find(process_id, attach=False))
    return Response(status_code=204)
