"""Errors as a client sees them: the tree of ``sandboxd.errors``, made from answers.

An answer's code picks the class; a code that this version does not know picks the nearest base by
``cause`` and keeps its own ``code``. What there is beside it is what no answer can say: that there
was none.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sandboxd import errors
from sandboxd.errors import NodeError, RequestError, SandboxdError, WorkloadError


class ConnectionFailed(NodeError):
    """No connection could be made: nothing was asked, and asking again is safe."""

    code = "node-unreachable"


class ConnectionLost(NodeError):
    """The connection broke before the answer: whether it was done is not known.

    Not ``retryable`` by itself: a command may have run. A client that goes away has its foreground
    command killed, and a create that had no answer is undone.
    """

    code = "connection-lost"
    retryable = False


class AnswerTimeout(ConnectionLost):
    """No answer within the time that was set for it."""

    code = "answer-timeout"


class NotSandboxd(NodeError):
    """What answers there is not sandboxd, or of another version."""

    code = "not-sandboxd"
    retryable = False


class ClientMisused(RequestError):
    """What was asked for cannot be sent: no address, no token, a client that is closed."""

    code = "client-misused"


_BASES: Final[dict[str, type[SandboxdError]]] = {
    "workload": WorkloadError,
    "request": RequestError,
    "node": NodeError,
}
_BY_CODE: Final = {kind.code: kind for kind in errors.subclasses()}


def error_from_body(body: bytes, status: int) -> SandboxdError:
    """The exception for an answer of 400 or more."""
    try:
        told = json.loads(body)["error"]
        return error_from_json(told)
    except (ValueError, KeyError, TypeError):
        return NotSandboxd(f"status {status} without the body of a sandboxd error", status=status)


def error_of_code(code: str, message: str) -> SandboxdError:
    """The exception for a code alone."""
    kind = _BY_CODE.get(code, NodeError)
    return kind(message)


def error_from_json(told: dict[str, Any]) -> SandboxdError:
    """The exception for ``code``, ``message``, ``cause``, ``retryable`` and maybe ``hint`` and
    ``detail``. Raises KeyError or TypeError where it is no such object."""
    code, cause = str(told["code"]), told["cause"]
    kind = _BY_CODE.get(code) or _BASES.get(cause, NodeError)
    hint, detail = told.get("hint"), told.get("detail") or {}
    error = kind(str(told["message"]), hint=None if hint is None else str(hint))
    error.detail.update(detail)
    # As told, where the node knows better than the class of this version.
    error.code, error.retryable = code, bool(told["retryable"])
    if cause in _BASES:
        error.cause = cause
    return error
