"""Run one command in a sandbox and wait for it, or be told of it while it runs.

The hot path of the API: no task, no copy and no validation between here and the control socket that
is not needed.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, exec_answer
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.disconnect import ClientWatch
from sandboxd.api.exception_handlers import documented
from sandboxd.api.ndjson import FrameResponse, wants_frames
from sandboxd.api.schemas.exec import ExecAnswer, ExecBody
from sandboxd.api.schemas.stream import FRAMES
from sandboxd.config import Config
from sandboxd.errors import RequestError
from sandboxd.model import ExecRequest
from sandboxd.runtime import exclusive
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.sandbox import Sandbox
from sandboxd.runtime.stream import Reader

router = APIRouter(prefix="/v1/sandboxes", tags=["exec"])

EXEC_ERRORS: Final = (
    errors.RequestError,
    errors.CwdNotFound,
    errors.UserNotFound,
    errors.UserNotMapped,
    errors.CommandTooLong,
    errors.SandboxNotFound,
    errors.SandboxPaused,
    errors.SandboxExclusive,
    errors.ProcessesStuck,
    errors.FreezeUnsupported,
    errors.SandboxDead,
    errors.SandboxLost,
    errors.OomKilled,
    errors.PidsExhausted,
    errors.DiskFull,
    errors.TooManyExecs,
    errors.ExecIdTaken,
    errors.ExecSetupFailed,
    errors.ImageUnavailable,
    errors.NodeError,
    errors.NodeUnavailable,
)


def exec_request(body: ExecBody, config: Config) -> ExecRequest:
    """What a body asks for. Raises RequestError for what this node does not allow."""
    try:
        request = body.to_request(config)
    except ValueError as error:
        raise RequestError(str(error)) from error
    check_exec_bounds(
        config, timeout_s=request.timeout_s, max_output_bytes=request.max_output_bytes
    )
    return request


def check_exec_bounds(config: Config, *, timeout_s: float, max_output_bytes: int) -> None:
    """Raises RequestError for what this node does not allow."""
    for name, asked, most in (
        ("timeout_s", timeout_s, config.max_timeout_s),
        ("max_output_bytes", max_output_bytes, config.max_output_bytes),
    ):
        if asked > most:
            raise RequestError(
                f"{name} is {asked:g}, this node allows {most:g}", field=name, maximum=most
            )


def _responses() -> dict[int | str, dict[str, Any]]:
    answers = documented(*EXEC_ERRORS)
    answers[200] = {"content": FRAMES}
    return answers


@router.post(
    "/{sandbox_id}/exec",
    response_model=ExecAnswer,
    openapi_extra=json_body(ExecBody),
    responses=_responses(),
)
async def exec_command(request: Request, sandbox_id: str) -> Response:
    """Run a command; answers when its main process has ended, or its time is up and its whole
    process tree is killed. A client that goes away kills it too, unless it is detached.

    With `Accept: application/x-ndjson` the answer is a stream of frames that begins at once and
    ends with an `exit` or `error` frame; there `max_output_bytes` and `truncate` do not count. A
    stream that was cut off can be taken up again from a seq
    (`GET /v1/sandboxes/{sandbox_id}/execs/{exec_id}`)."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(ExecBody, request)
    sandbox = runtime.find(sandbox_id)
    asked = exec_request(body, runtime.config)
    if wants_frames(request):
        reader = await stream_exec(runtime, sandbox, asked, body)
        return FrameResponse(reader, heartbeat_s=runtime.config.stream_heartbeat_s)
    running, done = await exclusive.start(runtime, sandbox, asked, exec_id=body.exec_id)
    with ClientWatch(request.receive, running.cancel if not asked.detach else lambda: None):
        try:
            # Shielded: the command's own end is what ends ``done``, also for a cancelled request.
            result = await asyncio.shield(done)
        except asyncio.CancelledError:
            if not asked.detach:
                running.cancel()
            raise
    return JsonAnswer(exec_answer(result, body.encoding))


async def stream_exec(
    runtime: Runtime, sandbox: Sandbox, asked: ExecRequest, body: ExecBody
) -> Reader:
    """Send a command off whose output is told in frames; the reader is at their beginning."""
    stream = runtime.streams.open(
        sandbox.id, encoding=body.encoding, detach=asked.detach, exec_id=body.exec_id
    )
    try:
        running, done = await exclusive.start(
            runtime,
            sandbox,
            asked,
            sinks=stream.sinks,
            on_started=stream.started,
            exec_id=stream.exec_id,
        )
    except BaseException:
        runtime.streams.discard(stream)
        raise
    stream.begin(running, done)
    return stream.attach(0)


@router.get(
    "/{sandbox_id}/execs/{exec_id}",
    response_class=Response,
    responses={
        **documented(
            errors.RequestError,
            errors.ExecNotFound,
            errors.SandboxNotFound,
            errors.StreamPositionLost,
            errors.NodeUnavailable,
        ),
        200: {"content": FRAMES},
    },
)
async def resume_exec(
    request: Request,
    sandbox_id: str,
    exec_id: str,
    from_seq: Annotated[int, Query(ge=0, le=1 << 62)] = 0,
) -> Response:
    """Take a stream up again after its connection was cut, from the first seq that was not seen.
    A client that is still there is let go."""
    runtime: Runtime = request.app.state.runtime
    runtime.find(sandbox_id)
    reader = runtime.streams.find(sandbox_id, exec_id).attach(from_seq)
    return FrameResponse(reader, heartbeat_s=runtime.config.stream_heartbeat_s)


@router.delete(
    "/{sandbox_id}/execs/{exec_id}",
    status_code=204,
    responses=documented(errors.SandboxNotFound, errors.NodeUnavailable),
)
async def kill_exec(request: Request, sandbox_id: str, exec_id: str) -> Response:
    """Kill a command that runs, detached or not, with its whole process tree, at once: none of it
    lives when this answers. Whoever waits for it gets its result (137, `signal` 9), a stream its
    `exit` frame. A session's command is interrupted instead, by force if need be: the session
    stays. What has ended is killed already, and so is what never was."""
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    if running := sandbox.execs.get(exec_id):
        running.cancel()
        await asyncio.wait((running.done,))
    elif stream := runtime.streams.get(sandbox_id, exec_id):
        await stream.kill()
    return Response(status_code=204)
