"""Answers that a node is watched by."""

from __future__ import annotations

from typing import Any, Final

from sandboxd.api.schemas.base import Answer


class HistoryPoint(Answer):
    """Of ten seconds; what is not known, or of nothing, is null."""

    at: str
    sandboxes: int
    waiting: int
    """Creates that waited for room."""
    creates: int
    create_p50_ms: float | None
    create_p95_ms: float | None
    execs: int
    exec_p50_ms: float | None
    exec_p95_ms: float | None
    memory_total_bytes: int
    memory_used_bytes: int
    """Of the whole machine."""
    sandboxes_memory_bytes: int | None
    daemon_memory_bytes: int
    loop_lag_ms: float
    """The worst lateness of the daemon's event loop."""


class HistoryAnswer(Answer):
    every_s: float
    points: list[HistoryPoint]


EVENT_LINES: Final[dict[str, Any]] = {
    "schema": {
        "type": "object",
        "description": "One line. `event` lines have all fields, the others `type` and `seq`.",
        "properties": {
            "type": {"enum": ["event", "heartbeat", "end"]},
            "seq": {"type": "integer"},
            "at": {"type": "string"},
            "kind": {"type": "string"},
            "sandbox": {"type": ["string", "null"]},
            "run": {"type": ["string", "null"]},
            "message": {"type": "string"},
            "detail": {"type": "object"},
        },
        "required": ["type", "seq"],
    },
    "example": {"type": "event", "seq": 7, "at": "2026-01-02T03:04:05.678Z", "kind": "failed"},
}
