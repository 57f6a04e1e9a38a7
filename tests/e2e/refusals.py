"""What an answer that refuses must look like.

For: every e2e test that expects an error. The body's shape is checked here once for all, so that a
test only says status, code and whose fault it was.
"""

from __future__ import annotations

from typing import Any

import httpx


def refusal(
    answer: httpx.Response, status: int, code: str, cause: str, *, retryable: bool | None = None
) -> dict[str, Any]:
    """The error of an answer that must be one; returned for what more a test wants of it."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"code", "message", "cause", "retryable", "hint", "detail"}
    assert (error["code"], error["cause"]) == (code, cause), error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["retryable"], bool)
    if cause != "node":
        # A policy that could make the machine look guilty would learn to crash.
        assert error["retryable"] is False
    if retryable is not None:
        assert error["retryable"] is retryable
    if status in (429, 503):
        assert int(answer.headers["Retry-After"]) > 0
    return error
