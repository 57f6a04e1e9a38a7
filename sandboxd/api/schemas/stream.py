"""The frames of a stream, as the OpenAPI document shows them.

For documentation and tests: frames are written by ``runtime/frames.py``, not through these.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, RootModel

from sandboxd.api.ndjson import MEDIA_TYPE
from sandboxd.api.schemas.base import Answer
from sandboxd.api.schemas.errors import ErrorDetail


class StartedFrame(Answer):
    seq: int
    type: Literal["started"]
    exec_id: str = Field(examples=["ex-w5t3d6c2nq4mzk7xq3v4y2a5pe"])
    pid: int
    """In the sandbox."""


class OutputFrame(Answer):
    seq: int
    type: Literal["stdout", "stderr"]
    data: str
    encoding: Literal["utf-8", "base64"]


class ExitFrame(Answer):
    seq: int
    type: Literal["exit"]
    exit_code: int
    signal: int | None
    timed_out: bool
    timeout_reason: Literal["wall", "idle-output"] | None
    oom_killed: bool
    stdout_total_bytes: int
    stderr_total_bytes: int
    wall_s: float
    cpu_user_s: float
    cpu_system_s: float
    peak_memory_bytes: int


class ErrorFrame(Answer):
    seq: int
    type: Literal["error"]
    error: ErrorDetail


class HeartbeatFrame(Answer):
    seq: int
    """That of the frame before it."""
    type: Literal["heartbeat"]


class Frame(
    RootModel[
        Annotated[
            StartedFrame | OutputFrame | ExitFrame | ErrorFrame | HeartbeatFrame,
            Field(discriminator="type"),
        ]
    ]
):
    """One line of a stream."""


FRAMES: Final[dict[str, Any]] = {
    MEDIA_TYPE: {
        "schema": {
            "type": "string",
            "description": "One JSON object a line: `started`, then `stdout` and `stderr`, now and"
            " then a `heartbeat`, and at the end `exit` or `error`. `seq` counts up by one; a"
            " heartbeat repeats the seq before it.",
        },
        "example": '{"seq":0,"type":"started","exec_id":"ex-w5t3d6c2nq4mzk7xq3v4y2a5pe","pid":7}\n'
        '{"seq":1,"type":"stdout","data":"hello\\n","encoding":"utf-8"}\n'
        '{"seq":2,"type":"exit","exit_code":0,"signal":null,"timed_out":false,"…":"…"}\n',
    }
}
