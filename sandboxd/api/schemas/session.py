"""Sessions over HTTP: what goes in and out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from sandboxd.api.schemas.base import AbsolutePath, Answer, Body, Environment, ExecId, Text, User
from sandboxd.api.schemas.exec import stdin_bytes


class SessionBody(Body):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"cwd": "/work"}, {"kind": "python"}]}
    )

    kind: Literal["shell", "python"] = "shell"
    """``shell``: the sandbox's bash, or sh where there is none. ``python``: its ``python3``."""
    cwd: AbsolutePath | None = None
    env: Environment = Field(default_factory=dict)
    user: User | None = None


class SessionExecBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"command": "cd src && export DEBUG=1"},
                {"command": "make", "timeout_s": 300},
            ]
        }
    )

    command: Annotated[Text, Field(max_length=1024 * 1024)]
    """Any number of lines, as the shell or Python takes them."""
    stdin: str | None = None
    """UTF-8 text; /dev/null if neither this nor ``stdin_base64`` is given."""
    stdin_base64: str | None = None
    timeout_s: float | None = Field(default=None, gt=0)
    """Then the command is interrupted, and killed if that does not end it; the session stays."""
    max_output_bytes: int | None = Field(default=None, ge=0)
    truncate: Literal["head", "tail", "both"] = "both"
    encoding: Literal["utf-8", "base64"] = "utf-8"
    exec_id: ExecId | None = None
    """Of its stream, to take it up by; made up if left out."""

    @model_validator(mode="after")
    def _one_stdin(self) -> SessionExecBody:
        if self.stdin is not None and self.stdin_base64 is not None:
            raise ValueError("stdin and stdin_base64 exclude each other")
        return self

    def stdin_data(self) -> bytes | None:
        """Raises ValueError for what is no base64."""
        return stdin_bytes(self.stdin, self.stdin_base64)


class SessionAnswer(Answer):
    id: str = Field(examples=["ss-w5t3d6c2nq4mzk7xq3v4y2a5pe"])
    kind: Literal["shell", "python"]
    state: Literal["open", "ended"]
    """``ended``: its interpreter has; a command is refused with ``session-ended``."""
    busy: bool
    """Whether a command runs, as far as this daemon knows."""
    user: str
    cwd: str
    """Where it began."""
    pid: int
    started_at: str
    ended_at: str | None
    exit_code: int | None
    """Of the interpreter, once it has ended."""
    signal: int | None


class SessionList(Answer):
    sessions: list[SessionAnswer]


class SessionExecAnswer(Answer):
    exit_code: int
    """The command's; 130 when it was interrupted, 124 when its time was up. Where the command ended
    the interpreter: that one's."""
    signal: int | None
    """The one that ended the interpreter."""
    timed_out: bool
    oom_killed: bool
    stdout: str
    stderr: str
    encoding: Literal["utf-8", "base64"]
    stdout_total_bytes: int
    stderr_total_bytes: int
    stdout_truncated: bool
    stderr_truncated: bool
    wall_s: float
    session_state: Literal["open", "ended"]


class InterruptAnswer(Answer):
    interrupted: bool
    """False where no command ran."""
