"""The one place that knows which HTTP status an error has.

Every answer of 400 or more has the same JSON body, whatever raised it: a route, the validation, the
router, the size limit or a bug::

    {"error": {"code", "message", "cause", "retryable", "hint", "detail"}}

A trainer decides by ``cause`` and ``retryable``; the status is for proxies and people.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from sandboxd import errors
from sandboxd.api.schemas.errors import ErrorAnswer
from sandboxd.errors import HttpError, MethodNotAllowed, RequestError, RouteNotFound, SandboxdError

log = logging.getLogger(__name__)

PROBLEMS_MAX: Final = 20
RETRY_AFTER_S: Final = 1
CLIENT_GONE: Final = 499
"""Nobody reads this; without it a client's going away would be logged as our failure."""


STATUS: Final[dict[type[SandboxdError], int]] = {
    errors.Unauthorized: 401,
    errors.RouteNotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.BodyTooLarge: 413,
    errors.LengthRequired: 411,
    errors.HttpError: 400,
    errors.SandboxNotFound: 404,
    errors.RunNotFound: 404,
    errors.RunEnded: 409,
    errors.QuotaExceeded: 429,
    errors.ImageNotFound: 404,
    errors.ExecNotFound: 404,
    errors.ProcessNotFound: 404,
    errors.ExecIdTaken: 409,
    errors.ProcessExists: 409,
    errors.SessionNotFound: 404,
    errors.SessionBusy: 409,
    errors.ProcessEnded: 409,
    errors.StdinClosed: 409,
    errors.NotATerminal: 409,
    errors.StreamPositionLost: 410,
    errors.FileNotFound: 404,
    errors.SymlinkInPath: 409,
    errors.FileAccessDenied: 403,
    errors.DirectoryNotEmpty: 409,
    errors.FileExists: 409,
    errors.FileBusy: 409,
    errors.FileChanged: 409,
    errors.RangeNotSatisfiable: 416,
    errors.IdempotencyConflict: 409,
    errors.SandboxPaused: 409,
    errors.SandboxBusy: 409,
    errors.SandboxExclusive: 409,
    errors.NetworkNotAllowed: 403,
    errors.MountNotAllowed: 403,
    errors.MountSourceNotFound: 404,
    errors.SandboxReset: 409,
    errors.SandboxRunning: 409,
    errors.SnapshotNotFound: 404,
    errors.CheckpointUnsupported: 501,
    errors.FreezeUnsupported: 501,
    errors.SeccompNotFound: 404,
    errors.ImageInUse: 409,
    # Request errors that are not listed: the request was understood and cannot be done.
    errors.RequestError: 422,
    # The sandbox is there to be looked at and deleted, but nothing can be done in it any more.
    errors.SandboxDead: 410,
    errors.SandboxLost: 410,
    errors.WorkloadError: 409,
    errors.NodeOverloaded: 429,
    # Of a reload, whose answer goes to the operator.
    errors.ConfigError: 409,
    errors.NetworkUnavailable: 501,
    errors.SandboxSetupError: 500,
    errors.NodeError: 503,
    errors.SandboxdError: 500,
}


def status_of(kind: type[SandboxdError]) -> int:
    """The status of the nearest class in the table."""
    return next(STATUS[one] for one in kind.__mro__ if one in STATUS)


def error_body(error: SandboxdError) -> bytes:
    return to_json(
        {
            "error": {
                "code": error.code,
                "message": error.message,
                "cause": error.cause,
                "retryable": error.retryable,
                "hint": error.hint,
                "detail": error.detail,
            }
        },
        fallback=str,
        inf_nan_mode="null",
    )


def note(scope: Scope, error: SandboxdError) -> SandboxdError:
    """Count a request that is answered with ``error``."""
    meters = getattr(scope["app"].state.runtime, "meters", None)
    if meters is not None:
        meters.refused(error)
    return error


def error_response(error: SandboxdError, headers: Mapping[str, str] | None = None) -> Response:
    all_headers = dict(headers or {})
    status = status_of(type(error))
    if status in (429, 503):
        all_headers["Retry-After"] = str(error.detail.get("retry_after_s", RETRY_AFTER_S))
    if status == 401:
        all_headers["WWW-Authenticate"] = "Bearer"
    return Response(error_body(error), status, all_headers, "application/json")


def bug_response(request: Request, error: Exception) -> Response:
    """For what should not have happened. Raise it again after this answer (Starlette does): then
    the server logs the traceback."""
    log.error("%s %s failed: %r", request.method, request.url.path, error)
    bug = SandboxdError("the daemon failed; its log says why")
    return error_response(note(request.scope, bug))


def validation_error(problems: Iterable[Mapping[str, Any]]) -> RequestError:
    """One error for what pydantic found. What was sent is not sent back: it may be a secret."""
    listed = [
        {"field": ".".join(str(part) for part in one["loc"]), "problem": str(one["msg"])}
        for one in problems
    ][:PROBLEMS_MAX]
    first = listed[0] if listed else {"field": "", "problem": "invalid"}
    return RequestError(f"{first['field']}: {first['problem']}", problems=listed)


def documented(*kinds: type[SandboxdError]) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route that may end with these errors, by status, with every code."""
    by_status: dict[int | str, list[type[SandboxdError]]] = {}
    if errors.NodeUnavailable in kinds and errors.NodeVersionMismatch not in kinds:
        kinds += (errors.NodeVersionMismatch,)  # for whoever needs the node, and none will do
    for kind in kinds:
        by_status.setdefault(status_of(kind), []).append(kind)
    return {
        status: {
            "model": ErrorAnswer,
            "description": "; ".join(f"`{kind.code}`: {_summary(kind)}" for kind in those),
            "content": {
                "application/json": {
                    "examples": {
                        kind.code: {
                            "value": {
                                "error": {
                                    "code": kind.code,
                                    "message": _summary(kind),
                                    "cause": kind.cause,
                                    "retryable": kind.retryable,
                                    "hint": None,
                                    "detail": {},
                                }
                            }
                        }
                        for kind in those
                    }
                }
            },
        }
        for status, those in by_status.items()
    }


def _summary(kind: type[SandboxdError]) -> str:
    # Not inspect.getdoc: it would give a class without words those of its base.
    words = kind.__dict__.get("__doc__") or kind.code.replace("-", " ").capitalize() + "."
    return str(words).strip().split("\n")[0]


def install(app: FastAPI) -> None:
    """Make every way to fail end in that body."""

    @app.exception_handler(SandboxdError)
    async def _ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, SandboxdError)
        return error_response(note(request.scope, error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # The first part of a location says where (body, query …); it is what tells two apart.
        return error_response(note(request.scope, validation_error(error.errors())))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(note(request.scope, _from_http(request, error)), error.headers)

    @app.exception_handler(ClientDisconnect)
    async def _gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        return bug_response(request, error)


def _from_http(request: Request, error: HTTPException) -> SandboxdError:
    if error.status_code == 404:
        return RouteNotFound(f"there is nothing at {request.url.path}")
    if error.status_code == 405:
        return MethodNotAllowed(f"{request.method} is not for {request.url.path}")
    return HttpError(str(error.detail), status=error.status_code)
