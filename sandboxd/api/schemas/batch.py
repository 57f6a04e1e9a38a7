"""Many in one request: what goes in and out."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field

from sandboxd.api.schemas.base import Answer, Body
from sandboxd.api.schemas.errors import ErrorDetail
from sandboxd.api.schemas.exec import ExecAnswer, ExecBody
from sandboxd.api.schemas.sandboxes import CreateBody, SandboxAnswer

ITEMS_MAX: Final = 1024


class CreateBatchBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"count": 16, "sandbox": {"image": "debian-python", "run": "grpo-17"}}]
        }
    )

    sandbox: CreateBody
    """What each of them is."""
    count: int = Field(ge=1, le=ITEMS_MAX)


class CreatedItem(Answer):
    index: int
    sandbox: SandboxAnswer | None
    """Null where ``error`` says why."""
    error: ErrorDetail | None


class CreateBatchAnswer(Answer):
    items: list[CreatedItem]
    """In order; one that failed does not undo the others."""
    created: int


class BatchExecBody(ExecBody):
    sandbox: Annotated[str, Field(max_length=64)]
    """The id of the sandbox to run it in."""


class ExecBatchBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "execs": [
                        {"sandbox": "sb-w5t3d6c2nq4mzk7xq3v4y2a5pe", "command": "make test"},
                        {"sandbox": "sb-7bd6rememyfsm6iluj3q4mwhau", "command": ["true"]},
                    ]
                }
            ]
        }
    )

    execs: Annotated[list[BatchExecBody], Field(min_length=1, max_length=ITEMS_MAX)]


class ExecutedItem(Answer):
    index: int
    result: ExecAnswer | None
    error: ErrorDetail | None


class ExecBatchAnswer(Answer):
    items: list[ExecutedItem]
    """In the order in which they were asked for."""
