"""Sessions: the requests and what comes back. No input or output here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Self, TypedDict
from urllib.parse import quote

from sandboxd.client.calls import FRAMES, JSON, ROOT, SILENCE_S, Call, exec_body, exec_read_s
from sandboxd.client.results import decoded, known, moment


class SessionOptions(TypedDict, total=False):
    """How a session begins; what is left out is the sandbox's."""

    kind: Literal["shell", "python"]
    cwd: str
    env: Mapping[str, str]
    user: str


class SessionExecOptions(TypedDict, total=False):
    stdin: str | bytes
    timeout_s: float
    """Then the command is interrupted, and killed if need be; the session stays."""
    max_output_bytes: int
    truncate: Literal["head", "tail", "both"]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session at the moment it was asked about."""

    id: str
    kind: str
    state: str
    """``open``, or ``ended`` once its interpreter has."""
    busy: bool
    user: str
    cwd: str
    pid: int
    started_at: datetime
    ended_at: datetime | None
    exit_code: int | None
    signal: int | None

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        ended = row["ended_at"]
        times = {
            "started_at": moment(row["started_at"]),
            "ended_at": None if ended is None else moment(ended),
        }
        return cls(**known(cls, row) | times)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """How a command of a session ended, and what it wrote."""

    exit_code: int
    """Its own; 130 when it was interrupted, 124 when its time was up."""
    signal: int | None
    timed_out: bool
    oom_killed: bool
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    stdout_total_bytes: int
    stderr_total_bytes: int
    stdout_truncated: bool
    stderr_truncated: bool
    wall_s: float
    session_state: str
    """``ended`` where the command ended the session (``exit``)."""

    @property
    def ok(self) -> bool:
        """Whether its exit code is 0."""
        return self.exit_code == 0

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        for name in ("stdout", "stderr"):
            row[f"{name}_bytes"] = decoded(row[name], row["encoding"])
        return cls(**known(cls, row))


SessionInfos = list[SessionInfo]


def open_new(sandbox: str, options: SessionOptions) -> Call[SessionInfo]:
    body: dict[str, Any] = dict(options)
    if "env" in body:
        body["env"] = dict(body["env"])
    return Call("POST", _path(sandbox), _info, json.dumps(body).encode(), JSON)


def list_all(sandbox: str) -> Call[SessionInfos]:
    def parse(body: bytes) -> SessionInfos:
        return [SessionInfo.from_json(row) for row in json.loads(body)["sessions"]]

    return Call("GET", _path(sandbox), parse, repeatable=True)


def get(sandbox: str, session: str) -> Call[SessionInfo]:
    return Call("GET", _path(sandbox, session), _info, repeatable=True)


def execute(
    sandbox: str, session: str, command: str, options: SessionExecOptions
) -> Call[SessionResult]:
    body = exec_body(command, options) | {"encoding": "base64"}
    return Call(
        "POST",
        f"{_path(sandbox, session)}/exec",
        lambda answer: SessionResult.from_json(json.loads(answer)),
        json.dumps(body).encode(),
        JSON,
        exec_read_s(options),
    )


def execute_stream(
    sandbox: str, session: str, command: str, options: SessionExecOptions, exec_id: str
) -> Call[None]:
    """Answered by frames, as an exec's stream, and taken up again like one."""
    body = exec_body(command, options) | {"encoding": "base64", "exec_id": exec_id}
    path = f"{_path(sandbox, session)}/exec"
    data = json.dumps(body).encode()
    return Call("POST", path, lambda _: None, data, (*JSON, *FRAMES), SILENCE_S)


def interrupt(sandbox: str, session: str) -> Call[bool]:
    def parse(body: bytes) -> bool:
        return bool(json.loads(body)["interrupted"])

    return Call("POST", f"{_path(sandbox, session)}/interrupt", parse)


def resize(sandbox: str, session: str, cols: int, rows: int) -> Call[None]:
    body = json.dumps({"cols": cols, "rows": rows}).encode()
    path = f"{_path(sandbox, session)}/resize"
    return Call("POST", path, lambda _: None, body, JSON, repeatable=True)


def close(sandbox: str, session: str) -> Call[None]:
    return Call("DELETE", _path(sandbox, session), lambda _: None, repeatable=True)


def _path(sandbox: str, session: str | None = None) -> str:
    path = f"{ROOT}/{quote(sandbox, safe='')}/sessions"
    return path if session is None else f"{path}/{quote(session, safe='')}"


def _info(body: bytes) -> SessionInfo:
    return SessionInfo.from_json(json.loads(body))
