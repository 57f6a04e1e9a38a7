"""What a node is watched by, as requests: its events, its metrics, its last hour. No input or
output here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self
from urllib.parse import urlencode

from sandboxd.client.calls import FRAMES, SILENCE_S, Call
from sandboxd.client.failures import NotSandboxd
from sandboxd.client.results import known, moment


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """Something that became of a sandbox, or of the node itself. ``seq`` only grows, over restarts
    of the daemon too. Of kind ``gap``: what came before it and was not told is lost."""

    seq: int
    at: datetime
    kind: str
    sandbox: str | None
    run: str | None
    message: str
    detail: dict[str, Any]

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        return cls(**known(cls, row) | {"at": moment(row["at"])})


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Of the ten seconds before ``at``; what is not known, or of nothing, is None."""

    at: datetime
    sandboxes: int
    waiting: int
    creates: int
    create_p50_ms: float | None
    create_p95_ms: float | None
    execs: int
    exec_p50_ms: float | None
    exec_p95_ms: float | None
    memory_total_bytes: int
    memory_used_bytes: int
    sandboxes_memory_bytes: int | None
    daemon_memory_bytes: int
    loop_lag_ms: float

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        return cls(**known(cls, row) | {"at": moment(row["at"])})


class EventLines:
    """Feed it what arrives; ``seq`` is how far it got, ``ended`` whether all was told."""

    def __init__(self, after: int) -> None:
        self.seq = after
        self.ended = False
        self.pieces = 0
        self._partial = b""

    def begin(self) -> None:
        """Another connection."""
        self._partial, self.ended = b"", False

    def feed(self, data: bytes) -> list[NodeEvent]:
        """The events in it. Raises NotSandboxd for what is no line of ours."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        found = []
        for line in lines:
            try:
                row = json.loads(line)
                self.seq = max(self.seq, int(row["seq"]))
                if row["type"] == "event":
                    found.append(NodeEvent.from_json(row))
                self.ended = row["type"] == "end"
            except (ValueError, KeyError, TypeError) as error:
                raise NotSandboxd(f"a line that is no event: {error}") from error
        return found


def events(
    after: int, *, follow: bool, run: str | None, sandbox: str | None, kinds: Sequence[str]
) -> Call[None]:
    query = [("after", str(after)), ("follow", str(follow).lower())]
    query += [(name, one) for name, one in (("run", run), ("sandbox", sandbox)) if one]
    query += [("kind", kind) for kind in kinds]
    path = f"/v1/events?{urlencode(query)}"
    return Call("GET", path, lambda _: None, None, FRAMES, SILENCE_S, repeatable=True)


def metrics() -> Call[str]:
    return Call("GET", "/metrics", bytes.decode, repeatable=True)


def history() -> Call[list[HistoryPoint]]:
    def parse(body: bytes) -> list[HistoryPoint]:
        return [HistoryPoint.from_json(one) for one in json.loads(body)["points"]]

    return Call("GET", "/v1/node/history", parse, repeatable=True)
