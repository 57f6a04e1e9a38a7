"""Background processes over HTTP: what goes in and out."""

from __future__ import annotations

import base64
import binascii
import signal
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from sandboxd.api.schemas.base import AbsolutePath, Answer, Body, Environment, Text, User, Word
from sandboxd.api.schemas.errors import ErrorDetail
from sandboxd.api.schemas.exec import TtyBody
from sandboxd.model import ExecRequest


class ProcessBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"command": ["python3", "-m", "http.server", "8000"], "name": "server"},
                {"command": "tail -f /var/log/app.log", "stdin": False},
            ]
        }
    )

    command: Annotated[list[Text], Field(min_length=1)] | Annotated[Text, Field(min_length=1)]
    """A list is run as it is; a string by the sandbox's bash, or sh where there is none."""
    name: Word = ""
    """For people; several may have the same."""
    cwd: AbsolutePath | None = None
    env: Environment = Field(default_factory=dict)
    user: User | None = None
    stdin: bool = True
    """Whether it gets a pipe that can be written; else it reads /dev/null."""
    login: bool = False
    merge_stderr: bool = False
    """Both streams as one, as ``stdout``."""
    tty: TtyBody | None = None
    """A terminal instead of pipes: what is written to it is typed in, all output is ``stdout``."""

    @model_validator(mode="after")
    def _check(self) -> ProcessBody:
        if self.command[0] == "":
            raise ValueError("the command's first word must not be empty")
        if self.login and not isinstance(self.command, str):
            raise ValueError("login is for a command that is a string")
        return self

    def to_request(self) -> ExecRequest:
        return ExecRequest(
            command=self.command if isinstance(self.command, str) else tuple(self.command),
            cwd=self.cwd,
            env=self.env,
            user=self.user,
            stdin=b"" if self.stdin else None,
            login=self.login,
            merge_stderr=self.merge_stderr,
            tty=self.tty.to_size() if self.tty else None,
        )


class StdinBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"data": "print(1)\n"}]})

    data: str = ""
    """UTF-8 text."""
    data_base64: str = ""
    eof: bool = False
    """Close it after that."""

    def content(self) -> bytes:
        """Raises ValueError for what is no base64."""
        try:
            return self.data.encode() + base64.b64decode(self.data_base64, validate=True)
        except binascii.Error as error:
            raise ValueError(f"data_base64: {error}") from error


class SignalBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"signal": "TERM"}]})

    signal: int | str = "TERM"
    """A number, or a name with or without ``SIG``."""
    scope: Literal["process", "tree"] = "process"
    """The main process alone, or every process that it started and that lives."""

    def number(self) -> int:
        """Raises ValueError for what is no signal of Linux."""
        if isinstance(self.signal, int):
            number = self.signal
        else:
            name = self.signal.upper()
            try:
                number = signal.Signals["SIG" + name.removeprefix("SIG")].value
            except KeyError:
                raise ValueError(f"no signal {self.signal!r}") from None
        if not 1 <= number <= 64:
            raise ValueError(f"no signal {number}")
        return number


class ProcessAnswer(Answer):
    id: str = Field(examples=["ps-w5t3d6c2nq4mzk7xq3v4y2a5pe"])
    name: str
    state: Literal["running", "exited", "failed"]
    """``failed``: it never ran, or went with its sandbox; ``error`` says why."""
    pid: int
    """In the sandbox."""
    command: list[str] | str
    """As far as it is kept to be shown."""
    user: str
    cwd: str
    stdin: bool
    tty: bool
    started_at: str
    ended_at: str | None
    exit_code: int | None
    """As of an exec; null while it runs, and where it failed."""
    signal: int | None
    oom_killed: bool
    cpu_user_s: float
    cpu_system_s: float
    peak_memory_bytes: int
    error: ErrorDetail | None


class OutputAnswer(Answer):
    data: str
    encoding: Literal["utf-8", "base64"]
    offset: int
    """Of the first byte of ``data`` in the stream."""
    next_offset: int
    """Where the following piece begins."""
    lost_bytes: int
    """Between the offset asked for and ``offset``: written, but not kept any more."""
    total_bytes: int
    """Written so far."""
    closed: bool
    """No process has it open any more: ``total_bytes`` is the end."""


class ProcessOutputAnswer(ProcessAnswer):
    stdout: OutputAnswer | None
    """Null unless ``stdout_offset`` was asked for."""
    stderr: OutputAnswer | None


class ProcessList(Answer):
    processes: list[ProcessAnswer]


class StdinAnswer(Answer):
    written_bytes: int
