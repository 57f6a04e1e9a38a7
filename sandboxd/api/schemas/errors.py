"""The one form of every refusal and failure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from sandboxd.api.schemas.base import Answer


class ErrorDetail(Answer):
    code: str = Field(examples=["sandbox-not-found"])
    message: str
    cause: Literal["workload", "request", "node"]
    """Whose fault: the policy's program, this request, or the machine."""
    retryable: bool
    """Whether the same request may succeed if it is sent again."""
    hint: str | None
    detail: dict[str, Any]


class ErrorAnswer(Answer):
    error: ErrorDetail
