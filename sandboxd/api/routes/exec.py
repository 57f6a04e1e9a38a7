"""Run one command in a sandbox and wait for it.

The hot path of the API: no task, no copy and no validation between here and the control socket that
is not needed.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, exec_answer
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.disconnect import ClientWatch
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas import ExecAnswer, ExecBody
from sandboxd.config import Config
from sandboxd.errors import RequestError
from sandboxd.model import ExecRequest
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1/sandboxes", tags=["exec"])


def _request(body: ExecBody, config: Config) -> ExecRequest:
    try:
        request = body.to_request(config)
    except ValueError as error:
        raise RequestError(str(error)) from error
    for name, asked, most in (
        ("timeout_s", request.timeout_s, config.max_timeout_s),
        ("max_output_bytes", request.max_output_bytes, config.max_output_bytes),
    ):
        if asked > most:
            raise RequestError(
                f"{name} is {asked:g}, this node allows {most:g}", field=name, maximum=most
            )
    return request


@router.post(
    "/{sandbox_id}/exec",
    response_model=ExecAnswer,
    openapi_extra=json_body(ExecBody),
    responses=documented(
        errors.RequestError,
        errors.CwdNotFound,
        errors.UserNotFound,
        errors.CommandTooLong,
        errors.SandboxNotFound,
        errors.SandboxPaused,
        errors.SandboxDead,
        errors.SandboxLost,
        errors.OomKilled,
        errors.PidsExhausted,
        errors.DiskFull,
        errors.TooManyExecs,
        errors.ExecSetupFailed,
        errors.NodeError,
        errors.NodeUnavailable,
    ),
)
async def exec_command(request: Request, sandbox_id: str) -> Response:
    """Run a command; answers when its main process has ended, or its time is up and its whole
    process tree is killed. A client that goes away kills it too."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(ExecBody, request)
    sandbox = runtime.find(sandbox_id)
    running = sandbox.start_exec(_request(body, runtime.config))
    with ClientWatch(request.receive, running.cancel):
        try:
            # Shielded: the command's own end is what ends ``done``, also for a cancelled request.
            result = await asyncio.shield(running.done)
        except asyncio.CancelledError:
            running.cancel()
            raise
    return JsonAnswer(exec_answer(result, body.encoding))
