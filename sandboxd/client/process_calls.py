"""Background processes: the requests, and following their output. No input or output here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, Self, TypedDict
from urllib.parse import quote, urlencode

from sandboxd.client.calls import ANSWER_S, BYTES, JSON, ROOT, Call
from sandboxd.client.failures import error_from_json
from sandboxd.client.results import Output, decoded, known, moment
from sandboxd.errors import SandboxdError

WAIT_S: Final = 30.0
"""Of one request that waits for news: proxies and people give up on longer ones."""
PIECE_BYTES: Final = 1024 * 1024
STREAMS: Final = ("stdout", "stderr")


class ProcessOptions(TypedDict, total=False):
    """How a process is started; what is left out is for the node to say."""

    name: str
    cwd: str
    env: Mapping[str, str]
    user: str
    stdin: bool
    """Whether it gets a pipe that can be written; the default is that it does."""
    login: bool
    merge_stderr: bool
    tty: Mapping[str, int]
    """A terminal of ``cols`` and ``rows``; all that is written to it comes as ``stdout``."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process at the moment it was asked about."""

    id: str
    name: str
    state: Literal["running", "exited", "failed"] | str
    pid: int
    command: list[str] | str
    user: str
    cwd: str
    stdin: bool
    tty: bool
    started_at: datetime
    ended_at: datetime | None
    exit_code: int | None
    signal: int | None
    oom_killed: bool
    cpu_user_s: float
    cpu_system_s: float
    peak_memory_bytes: int
    error: SandboxdError | None
    """Why it failed."""

    @property
    def running(self) -> bool:
        return self.state == "running"

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        ended, error = row["ended_at"], row["error"]
        own = {
            "started_at": moment(row["started_at"]),
            "ended_at": None if ended is None else moment(ended),
            "error": None if error is None else error_from_json(error),
        }
        return cls(**known(cls, row) | own)


Processes = list[ProcessInfo]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one stream from the offset that was asked for, or from the oldest byte kept."""

    data: bytes
    offset: int
    next_offset: int
    lost_bytes: int
    total_bytes: int
    closed: bool

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        return cls(**known(cls, row) | {"data": decoded(row["data"], row["encoding"])})


@dataclass(frozen=True, slots=True)
class ProcessNews:
    """A process, and what was asked for of its output."""

    info: ProcessInfo
    stdout: Piece | None
    stderr: Piece | None

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        pieces = [row[name] and Piece.from_json(row[name]) for name in STREAMS]
        return cls(ProcessInfo.from_json(row), *pieces)


def start(sandbox: str, command: str | Sequence[str], options: ProcessOptions) -> Call[ProcessInfo]:
    words = command if isinstance(command, str) else list(command)
    body: dict[str, Any] = {"command": words, **options}
    for name in ("env", "tty"):
        if name in body:
            body[name] = dict(body[name])
    return Call("POST", _path(sandbox), _info, json.dumps(body).encode(), JSON)


def list_all(sandbox: str) -> Call[Processes]:
    def parse(body: bytes) -> Processes:
        return [ProcessInfo.from_json(row) for row in json.loads(body)["processes"]]

    return Call("GET", _path(sandbox), parse, repeatable=True)


def news(
    sandbox: str,
    process: str,
    *,
    wait_s: float = 0.0,
    offsets: Mapping[str, int] | None = None,
    max_bytes: int = PIECE_BYTES,
) -> Call[ProcessNews]:
    query = {"wait_s": str(wait_s), "encoding": "base64", "max_bytes": str(max_bytes)}
    query |= {f"{name}_offset": str(offset) for name, offset in (offsets or {}).items()}
    return Call(
        "GET",
        f"{_path(sandbox, process)}?{urlencode(query)}",
        lambda body: ProcessNews.from_json(json.loads(body)),
        read_s=ANSWER_S + wait_s,
        repeatable=True,
    )


def write(sandbox: str, process: str, data: bytes, eof: bool, timeout_s: float) -> Call[int]:
    query = urlencode({"timeout_s": str(timeout_s)} | ({"eof": "true"} if eof else {}))
    return Call(
        "POST",
        f"{_path(sandbox, process)}/stdin?{query}",
        lambda body: int(json.loads(body)["written_bytes"]),
        data,
        BYTES,
        ANSWER_S + timeout_s,
    )


def close_stdin(sandbox: str, process: str) -> Call[None]:
    return Call("DELETE", f"{_path(sandbox, process)}/stdin", _nothing, repeatable=True)


def send_signal(sandbox: str, process: str, number: int | str, tree: bool) -> Call[None]:
    body = {"signal": number, "scope": "tree" if tree else "process"}
    path = f"{_path(sandbox, process)}/signal"
    return Call("POST", path, _nothing, json.dumps(body).encode(), JSON)


def resize(sandbox: str, process: str, cols: int, rows: int) -> Call[None]:
    body = json.dumps({"cols": cols, "rows": rows}).encode()
    path = f"{_path(sandbox, process)}/resize"
    return Call("POST", path, _nothing, body, JSON, repeatable=True)


def remove(sandbox: str, process: str) -> Call[None]:
    return Call("DELETE", _path(sandbox, process), _nothing, repeatable=True)


class Follow:
    """Reads a process's output from its beginning, or from ``offsets``, to its end::

        while not follow.ended:
            outputs = follow.take(do(follow.call()))

    The end is that the process has ended and all it wrote was taken; what it left in the background
    may hold its pipes for ever.
    """

    def __init__(
        self, sandbox: str, process: str, offsets: Mapping[str, int] | None = None
    ) -> None:
        self._sandbox = sandbox
        self._process = process
        self.offsets = dict.fromkeys(STREAMS, 0) | dict(offsets or {})
        self.lost_bytes = 0
        """Written faster than they were taken: only the newest are kept."""
        self.ended = False

    def call(self, wait_s: float = WAIT_S) -> Call[ProcessNews]:
        return news(self._sandbox, self._process, wait_s=wait_s, offsets=self.offsets)

    def take(self, told: ProcessNews) -> list[Output]:
        outputs, drained = [], True
        for name, piece in (("stdout", told.stdout), ("stderr", told.stderr)):
            if piece is None:
                continue
            self.offsets[name] = piece.next_offset
            self.lost_bytes += piece.lost_bytes
            drained &= piece.next_offset >= piece.total_bytes
            if piece.data:
                stream: Literal["stdout", "stderr"] = "stdout" if name == "stdout" else "stderr"
                outputs.append(Output(stream, piece.data))
        self.ended = drained and not told.info.running
        return outputs


def _path(sandbox: str, process: str | None = None) -> str:
    path = f"{ROOT}/{quote(sandbox, safe='')}/processes"
    return path if process is None else f"{path}/{quote(process, safe='')}"


def _info(body: bytes) -> ProcessInfo:
    return ProcessInfo.from_json(json.loads(body))


def _nothing(body: bytes) -> None:
    del body
