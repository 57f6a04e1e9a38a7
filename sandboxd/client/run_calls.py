"""Requests about runs and draining, and what comes back. No input or output here."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self, TypedDict
from urllib.parse import quote, urlencode

from sandboxd.client.calls import JSON, PAGE, Call
from sandboxd.client.failures import error_from_json
from sandboxd.client.results import known, moment
from sandboxd.errors import SandboxdError

ROOT: Final = "/v1/runs"
LEASE_S: Final = 60.0
BEATS: Final = 3
"""Heartbeats in a lease: two may be lost."""
END_MARGIN_S: Final = 30.0


class RunOptions(TypedDict, total=False):
    """What a run may have; what is left out is for the node to say."""

    max_sandboxes: int
    """At once; 0: no quota."""
    max_creates_per_s: float


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run at the moment it was asked about."""

    name: str
    state: str
    """``active`` or ``ended``."""
    created_at: datetime | None
    """None where nobody has set it up: it is a name that sandboxes have in common."""
    lease_s: float | None
    expires_at: datetime | None
    """When it ends without another heartbeat."""
    max_sandboxes: int
    max_creates_per_s: float
    sandboxes: int
    snapshots: int
    waiting: int

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        times = {
            name: None if row.get(name) is None else moment(row[name])
            for name in ("created_at", "expires_at")
        }
        return cls(**known(cls, row) | times)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """What became of all that a run had: ``pending`` and ``failed`` go on by themselves."""

    deleted: tuple[str, ...]
    pending: tuple[str, ...]
    failed: dict[str, SandboxdError]
    snapshots: tuple[str, ...]
    refused: int
    """Creates that waited for room."""

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        failed = {str(one["id"]): error_from_json(one) for one in row["failed"]}
        return cls(
            tuple(row["deleted"]),
            tuple(row["pending"]),
            failed,
            tuple(row["snapshots"]),
            int(row["refused"]),
        )


@dataclass(frozen=True, slots=True)
class DrainInfo:
    draining: bool
    why: str | None
    """``asked`` or ``job-end``."""
    since: datetime | None
    deadline: datetime | None
    """When everything is deleted."""
    sandboxes: int

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        times = {
            name: None if row.get(name) is None else moment(row[name])
            for name in ("since", "deadline")
        }
        return cls(**known(cls, row) | times)


RunPage = tuple[list[RunInfo], str | None]


def new_name() -> str:
    return f"run-{uuid.uuid4().hex[:16]}"


def put(name: str, lease_s: float | None, options: RunOptions) -> Call[RunInfo]:
    return _send("PUT", _path(name), {"lease_s": lease_s, **options}, RunInfo.from_json)


def heartbeat(name: str, lease_s: float) -> Call[RunInfo]:
    """Sent once: whoever sends it does so again and again."""
    return Call(
        "POST",
        f"{_path(name)}/heartbeat",
        _parser(RunInfo.from_json),
        read_s=max(lease_s / BEATS, 1.0),
        retry_s=0.0,
    )


def next_beat_s(lease_s: float, *, heard: bool) -> float:
    """Until the next heartbeat; sooner where the last was not heard."""
    each_s = lease_s / BEATS
    return each_s if heard else min(each_s, 1.0)


def get(name: str) -> Call[RunInfo]:
    return Call("GET", _path(name), _parser(RunInfo.from_json), repeatable=True)


def list_page(after: str) -> Call[RunPage]:
    def parse(body: bytes) -> RunPage:
        row = json.loads(body)
        return [RunInfo.from_json(one) for one in row["runs"]], row["next"]

    query = urlencode({"limit": PAGE, "after": after})
    return Call("GET", f"{ROOT}?{query}", parse, repeatable=True)


def end(name: str, within_s: float) -> Call[RunEnd]:
    path = f"{_path(name)}?{urlencode({'within_s': within_s})}"
    return Call(
        "DELETE", path, _parser(RunEnd.from_json), read_s=within_s + END_MARGIN_S, repeatable=True
    )


def drain(deadline_s: float | None) -> Call[DrainInfo]:
    return _send("POST", "/v1/node/drain", {"deadline_s": deadline_s}, DrainInfo.from_json)


def undrain() -> Call[DrainInfo]:
    return Call("POST", "/v1/node/undrain", _parser(DrainInfo.from_json), repeatable=True)


def _send(
    method: str, path: str, body: dict[str, Any], make: Callable[[dict[str, Any]], Any]
) -> Call[Any]:
    return Call(method, path, _parser(make), json.dumps(body).encode(), JSON, repeatable=True)


def _parser(make: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], Any]:
    return lambda body: make(json.loads(body))


def _path(name: str) -> str:
    # Quoted whole: a name with a slash or a question mark must not reach another route.
    return f"{ROOT}/{quote(name, safe='')}"
