"""A command, and what came of it."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from sandboxd.api.schemas.base import AbsolutePath, Answer, Body, Environment, ExecId, Text, User
from sandboxd.config import Config
from sandboxd.model import Exclusive, ExecRequest, Truncate, TtySize


def stdin_bytes(text: str | None, text_base64: str | None) -> bytes | None:
    """What a command is to read; None for /dev/null. Raises ValueError for what is no base64."""
    if text_base64 is None:
        return None if text is None else text.encode()
    try:
        return base64.b64decode(text_base64, validate=True)
    except binascii.Error as error:
        raise ValueError(f"stdin_base64: {error}") from error


class TtyBody(Body):
    """A terminal and its size in characters."""

    cols: int = Field(default=80, ge=1, le=0xFFFF)
    rows: int = Field(default=24, ge=1, le=0xFFFF)

    def to_size(self) -> TtySize:
        return TtySize(self.cols, self.rows)


class ExecBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"command": ["pytest", "-q"], "cwd": "/work", "timeout_s": 300},
                {"command": "cd /work && git diff | head -100"},
            ]
        }
    )

    command: Annotated[list[Text], Field(min_length=1)] | Annotated[Text, Field(min_length=1)]
    """A list is run as it is; a string by the sandbox's bash, or sh where there is none."""
    cwd: AbsolutePath | None = None
    """The sandbox's workdir if left out."""
    env: Environment = Field(default_factory=dict)
    """On top of the sandbox's."""
    user: User | None = None
    stdin: str | None = None
    """UTF-8 text; /dev/null if neither this nor ``stdin_base64`` is given."""
    stdin_base64: str | None = None
    timeout_s: float | None = Field(default=None, gt=0)
    """Then its whole process tree is killed and ``timed_out`` is true."""
    grace_s: float = Field(default=2.0, ge=0, le=60)
    """Between SIGTERM and SIGKILL once the time is up."""
    max_output_bytes: int | None = Field(default=None, ge=0)
    """Kept of each stream; the rest is read and counted."""
    truncate: Literal["head", "tail", "both"] = "both"
    """Which part of a longer stream is kept; ``both``: half from each end."""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    """Of the output in the answer; in ``utf-8`` what is none is replaced by U+FFFD."""

    login: bool = False
    """Run a command that is a string by a login shell."""
    idle_output_timeout_s: float | None = Field(default=None, gt=0)
    """As ``timeout_s``, from the last byte of output."""
    merge_stderr: bool = False
    """Both streams as one, in the order in which they were written, as ``stdout``."""
    tty: TtyBody | None = None
    """Run it in a terminal of its own: all output is ``stdout`` then, and ``stdin`` is typed in.
    ``TERM`` is set if nobody else does."""
    detach: bool = False
    """Whether it goes on without its client. A stream of it can be taken up later."""
    exec_id: ExecId | None = None
    """To kill it by, and to take up its stream; made up for a stream if left out. Not that of
    another command that runs in this sandbox."""
    exclusive: bool | Literal["kill", "freeze"] = False
    """Run it with nothing else alive in the sandbox: every other process, whoever started it, is
    killed first (`true` or `"kill"`), or frozen until it has ended (`"freeze"`). Until then any
    other command, session or file request is refused (`sandbox-exclusive`); those under way end by
    signal 9. What the command leaves behind is killed before its answer."""

    @model_validator(mode="after")
    def _one_stdin(self) -> ExecBody:
        if self.stdin is not None and self.stdin_base64 is not None:
            raise ValueError("stdin and stdin_base64 exclude each other")
        if self.command[0] == "":
            raise ValueError("the command's first word must not be empty")
        if self.login and not isinstance(self.command, str):
            raise ValueError("login is for a command that is a string")
        if self.exclusive and self.detach:
            raise ValueError("an exclusive command cannot be detached")
        return self

    def stdin_bytes(self) -> bytes | None:
        """Raises ValueError for what is no base64."""
        return stdin_bytes(self.stdin, self.stdin_base64)

    def to_request(self, config: Config) -> ExecRequest:
        """Raises ValueError for what is no base64."""
        return ExecRequest(
            command=self.command if isinstance(self.command, str) else tuple(self.command),
            cwd=self.cwd,
            env=self.env,
            user=self.user,
            stdin=self.stdin_bytes(),
            timeout_s=config.default_timeout_s if self.timeout_s is None else self.timeout_s,
            grace_s=self.grace_s,
            max_output_bytes=(
                config.default_output_bytes
                if self.max_output_bytes is None
                else self.max_output_bytes
            ),
            truncate=Truncate(self.truncate),
            login=self.login,
            idle_output_timeout_s=self.idle_output_timeout_s,
            merge_stderr=self.merge_stderr,
            tty=self.tty.to_size() if self.tty else None,
            detach=self.detach,
            exclusive=_exclusive(self.exclusive),
        )


def _exclusive(asked: bool | str) -> Exclusive | None:
    if isinstance(asked, str):
        return Exclusive(asked)
    return Exclusive.KILL if asked else None


class ExecAnswer(Answer):
    exit_code: int
    """The command's own; 128+n when signal n ended it, 124 when the time was up, 127 not found,
    126 not executable."""
    signal: int | None
    timed_out: bool
    timeout_reason: Literal["wall", "idle-output"] | None
    """Which time was up."""
    oom_killed: bool
    stdout: str
    stderr: str
    encoding: Literal["utf-8", "base64"]
    stdout_total_bytes: int
    stderr_total_bytes: int
    stdout_truncated: bool
    stderr_truncated: bool
    wall_s: float
    cpu_user_s: float
    cpu_system_s: float
    peak_memory_bytes: int
