"""Sessions: an interpreter that keeps its directory, variables and functions between commands."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, session_answer, session_exec_answer
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.disconnect import ClientWatch
from sandboxd.api.exception_handlers import documented
from sandboxd.api.ndjson import FrameResponse, wants_frames
from sandboxd.api.routes.exec import EXEC_ERRORS, check_exec_bounds
from sandboxd.api.schemas.exec import TtyBody
from sandboxd.api.schemas.session import (
    InterruptAnswer,
    SessionAnswer,
    SessionBody,
    SessionExecAnswer,
    SessionExecBody,
    SessionList,
)
from sandboxd.api.schemas.stream import FRAMES
from sandboxd.errors import RequestError
from sandboxd.model import ExecResult, Truncate
from sandboxd.runtime.frames import exit_fields
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.output import Capture
from sandboxd.runtime.sessions import SessionTable
from sandboxd.runtime.shells import SessionKind

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/sessions", tags=["sessions"])

LOOKUP_ERRORS: Final = (
    errors.SandboxNotFound,
    errors.SessionNotFound,
    errors.SandboxDead,
    errors.NodeError,
    errors.NodeUnavailable,
)


def _table(request: Request, sandbox_id: str) -> SessionTable:
    runtime: Runtime = request.app.state.runtime
    return runtime.sessions.of(runtime.find(sandbox_id))


@router.post(
    "",
    status_code=201,
    response_model=SessionAnswer,
    openapi_extra=json_body(SessionBody),
    responses=documented(*EXEC_ERRORS, errors.TooManyProcesses, errors.SessionEnded),
)
async def open_session(request: Request, sandbox_id: str) -> Response:
    """Open a session. It lives until it is closed, ends itself (`exit`), or its sandbox ends, also
    over a restart of the daemon."""
    body = await parse(SessionBody, request)
    session = await _table(request, sandbox_id).open(
        SessionKind(body.kind), cwd=body.cwd, env=body.env, user=body.user
    )
    location = {"Location": f"/v1/sandboxes/{sandbox_id}/sessions/{session.process.id}"}
    return JsonAnswer(session_answer(session.process, busy=False), 201, location)


@router.get("", response_model=SessionList, responses=documented(*LOOKUP_ERRORS))
async def list_sessions(request: Request, sandbox_id: str) -> Response:
    """All that were not closed, in the order in which they were opened."""
    table = _table(request, sandbox_id)
    listed = [session_answer(one, busy=table.is_busy(one.id)) for one in await table.all()]
    return JsonAnswer({"sessions": listed})


@router.get("/{session_id}", response_model=SessionAnswer, responses=documented(*LOOKUP_ERRORS))
async def get(request: Request, sandbox_id: str, session_id: str) -> Response:
    """One session."""
    table = _table(request, sandbox_id)
    process = await table.look_up(session_id)
    return JsonAnswer(session_answer(process, busy=table.is_busy(session_id)))


@router.post(
    "/{session_id}/exec",
    response_model=SessionExecAnswer,
    openapi_extra=json_body(SessionExecBody),
    responses={
        **documented(*EXEC_ERRORS, *LOOKUP_ERRORS, errors.SessionBusy, errors.SessionEnded),
        200: {"content": FRAMES},
    },
)
async def exec_command(request: Request, sandbox_id: str, session_id: str) -> Response:
    """Run a command in the session; one at a time. What it leaves in the background goes on and
    does not hold up the answer. A client that goes away interrupts it.

    With `Accept: application/x-ndjson` the answer is a stream of frames, as of an exec, and can be
    resumed likewise."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(SessionExecBody, request)
    try:
        stdin = body.stdin_data()
    except ValueError as error:
        raise RequestError(str(error)) from error
    config = runtime.config
    timeout_s = config.default_timeout_s if body.timeout_s is None else body.timeout_s
    cap = config.default_output_bytes if body.max_output_bytes is None else body.max_output_bytes
    check_exec_bounds(config, timeout_s=timeout_s, max_output_bytes=cap)
    table = _table(request, sandbox_id)
    session = await table.find(session_id)
    if wants_frames(request):

        def end(result: ExecResult) -> dict[str, Any]:
            state = "ended" if session.ended else "open"
            return {**exit_fields(result), "session_state": state}

        stream = runtime.streams.open(
            sandbox_id, encoding=body.encoding, detach=False, exec_id=body.exec_id
        )
        try:
            running = await table.start(
                session, body.command, stdin=stdin, timeout_s=timeout_s, sinks=stream.sinks
            )
        except BaseException:
            runtime.streams.discard(stream)
            raise
        stream.started(session.process.pid)
        stream.begin(running, running.done, end)
        return FrameResponse(stream.attach(0), heartbeat_s=config.stream_heartbeat_s)
    truncate = Truncate(body.truncate)
    running = await table.start(
        session,
        body.command,
        stdin=stdin,
        timeout_s=timeout_s,
        sinks=(Capture(cap, truncate), Capture(cap, truncate)),
    )
    with ClientWatch(request.receive, running.cancel):
        try:
            result = await asyncio.shield(running.done)
        except asyncio.CancelledError:
            running.cancel()
            raise
    return JsonAnswer(session_exec_answer(result, body.encoding, ended=session.ended))


@router.post(
    "/{session_id}/interrupt",
    response_model=InterruptAnswer,
    responses=documented(*LOOKUP_ERRORS),
)
async def interrupt(request: Request, sandbox_id: str, session_id: str) -> Response:
    """End the command that runs, as Ctrl-C does, and by force if that does not; the session stays
    and the command answers with 130."""
    session = await _table(request, sandbox_id).find(session_id)
    return JsonAnswer({"interrupted": session.interrupt()})


@router.post(
    "/{session_id}/resize",
    status_code=204,
    openapi_extra=json_body(TtyBody),
    responses=documented(*LOOKUP_ERRORS, errors.RequestError, errors.SessionEnded),
)
async def resize(request: Request, sandbox_id: str, session_id: str) -> Response:
    """How wide and high the lines of later commands are. A session has no terminal: it is told by
    `COLUMNS` and `LINES`, which programs go by without one."""
    body = await parse(TtyBody, request)
    session = await _table(request, sandbox_id).find(session_id)
    session.resize(body.cols, body.rows)
    return Response(status_code=204)


@router.delete("/{session_id}", status_code=204, responses=documented(*LOOKUP_ERRORS))
async def close(request: Request, sandbox_id: str, session_id: str) -> Response:
    """End the session with all that it has started. When this answers, none of it lives."""
    await _table(request, sandbox_id).close(session_id)
    return Response(status_code=204)
