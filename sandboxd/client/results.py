"""What calls return: frozen values, made from JSON whose unknown fields are passed over.

Times are aware datetimes, sizes bytes, modes numbers. Not the schemas: those describe what a node
of this very version sends, a client must bear with a newer one.
"""

from __future__ import annotations

import binascii
import functools
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal, Self, TypeVar

from sandboxd.client.failures import error_from_json
from sandboxd.errors import SandboxdError
from sandboxd.model import Limits, SandboxState

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox at the moment it was asked about."""

    id: str
    state: SandboxState | str
    """A state of this version, or the text that a newer node gave."""
    image: str
    image_key: str
    snapshot: str | None
    """What it began as, if not as the bare image."""
    copy_from: dict[str, Any] | None
    """``sandbox`` and ``paths``: the files of another one that it was made with."""
    seccomp: dict[str, str] | None
    """``name`` and ``digest`` of a profile of its own."""
    run: str
    name: str
    labels: dict[str, str]
    node: str
    limits: Limits
    """Those in effect."""
    enforcement: dict[str, str]
    """How each limit is held: ``enforced``, ``watchdog`` or ``none``."""
    user: str
    workdir: str
    hostname: str
    network: str | dict[str, Any]
    """``none``, ``full``, or what is allowed."""
    mounts: list[dict[str, Any]]
    """Of the node's files: ``source``, ``target``, ``read_only`` and ``ids``."""
    ttl_s: float
    idle_timeout_s: float | None
    created_at: datetime
    expires_at: datetime
    phases_ms: dict[str, float]
    failure: SandboxdError | None
    """Why nothing can run in it any more."""

    @classmethod
    def from_json(cls, row: Json) -> Self:
        whole: Json = {one.name: row.get(one.name) for one in fields(cls)}
        state, failure = str(row["state"]), row.get("failure")
        whole |= {
            "state": SandboxState(state) if state in set(SandboxState) else state,
            "limits": Limits(**known(Limits, row["limits"])),
            "created_at": moment(row["created_at"]),
            "expires_at": moment(row["expires_at"]),
            "failure": None if failure is None else error_from_json(failure),
        }
        return cls(**whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecExit:
    """How a command ended."""

    exit_code: int
    """Its own; 128+n for signal n, 124 when its time was up, 127 not found, 126 not executable."""
    signal: int | None
    timed_out: bool
    timeout_reason: str | None = None
    """``wall`` or ``idle-output``."""
    oom_killed: bool
    stdout_total_bytes: int
    stderr_total_bytes: int
    wall_s: float
    cpu_user_s: float
    cpu_system_s: float
    peak_memory_bytes: int

    @property
    def ok(self) -> bool:
        """Whether its exit code is 0."""
        return self.exit_code == 0

    @classmethod
    def from_json(cls, row: Json) -> Self:
        return cls(**known(cls, row))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamExit(ExecExit):
    """How a command ended whose output was told as it came."""

    session_state: str | None = None
    """Of a session's command: ``open``, or ``ended`` where it ended the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult(ExecExit):
    """How a command ended, and what it wrote. The bytes are exact; the text properties replace what
    is no UTF-8."""

    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    stdout_truncated: bool
    stderr_truncated: bool

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @classmethod
    def from_json(cls, row: Json) -> Self:
        # ``row`` is the parser's own: nobody else looks at it.
        encoding = row["encoding"]
        row["stdout_bytes"] = decoded(row["stdout"], encoding)
        row["stderr_bytes"] = decoded(row["stderr"], encoding)
        return cls(**known(cls, row))


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of what a command writes, while it runs."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True)
class FileInfo:
    path: str
    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int

    @classmethod
    def from_json(cls, row: Json) -> Self:
        return cls(**known(cls, row) | {"mode": int(row["mode"], 8)})


@dataclass(frozen=True, slots=True)
class Stats:
    """What a sandbox uses, and has used. None: the node cannot tell."""

    at: datetime
    cpu_usage_s: float | None
    cpu_user_s: float | None
    cpu_system_s: float | None
    cpu_periods: int | None
    cpu_throttled_periods: int | None
    cpu_throttled_s: float | None
    memory_used_bytes: int | None
    memory_peak_bytes: int | None
    memory_limit_bytes: int | None
    memory_oom_kills: int | None
    pids_count: int | None
    pids_limit: int | None
    pids_refused: int | None
    disk_used_bytes: int | None
    disk_size_bytes: int | None
    disk_used_inodes: int | None
    disk_inodes: int | None
    io_read_bytes: int | None
    io_written_bytes: int | None

    @classmethod
    def from_json(cls, row: Json) -> Self:
        flat = {
            f"{group}_{name}": value
            for group, figures in row.items()
            if isinstance(figures, dict)
            for name, value in figures.items()
        }
        whole: Json = {one.name: flat.get(one.name) for one in fields(cls)}
        return cls(**whole | {"at": moment(row["at"])})


@dataclass(frozen=True, slots=True)
class Event:
    seq: int
    at: datetime
    kind: str
    message: str
    detail: dict[str, Any]

    @classmethod
    def from_json(cls, row: Json) -> Self:
        return cls(**known(cls, row) | {"at": moment(row["at"])})


@dataclass(frozen=True, slots=True)
class EgressEntry:
    """Where a sandbox went or was stopped, or a name it asked for, and how often."""

    seq: int
    kind: str
    """``connection`` or ``dns``."""
    allowed: bool
    protocol: str
    address: str
    port: int
    name: str
    addresses: list[str]
    first_at: datetime
    last_at: datetime
    count: int

    @classmethod
    def from_json(cls, row: Json) -> Self:
        times = {name: moment(row[name]) for name in ("first_at", "last_at")}
        return cls(**known(cls, row) | times)


@dataclass(frozen=True, slots=True)
class Egress:
    """A page of a sandbox's egress log, the least recent first."""

    entries: list[EgressEntry]
    counts: dict[str, int]
    next: int
    """Give it as ``after`` to get what is new since."""
    more: bool

    @classmethod
    def from_json(cls, row: Json) -> Self:
        entries = [EgressEntry.from_json(one) for one in row["entries"]]
        return cls(**known(cls, row) | {"entries": entries})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sandbox's files at one moment, to go back to or to fork from."""

    id: str
    sandbox: str
    """Where it was taken; that one may be gone."""
    run: str
    name: str
    image: str
    image_key: str
    bytes: int
    created_at: datetime
    expires_at: datetime
    how: str | None = None
    """``frozen``: nothing was copied; ``killed`` or ``copied``, as ``on_running`` allowed. Known to
    who took it."""
    frozen_ms: float | None = None
    """For how long the processes stood still for a copy."""

    @classmethod
    def from_json(cls, row: Json) -> Self:
        times = {name: moment(row[name]) for name in ("created_at", "expires_at")}
        return cls(**known(cls, row) | times)


@dataclass(frozen=True, slots=True)
class Deleted:
    """What became of each of many: ``pending`` and ``failed`` are tried on by the node itself."""

    deleted: tuple[str, ...]
    pending: tuple[str, ...]
    failed: dict[str, SandboxdError]

    @classmethod
    def from_json(cls, row: Json) -> Self:
        failed = {str(one["id"]): error_from_json(one) for one in row["failed"]}
        return cls(tuple(row["deleted"]), tuple(row["pending"]), failed)


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    size_bytes: int | None
    mounted: bool
    users: int
    """Sandboxes that have it as their root."""
    modified_at: datetime | None
    local: bool = False
    """All of it is known to be copied to the node's disk."""

    @classmethod
    def from_json(cls, row: Json) -> Self:
        at = row.get("modified_at")
        return cls(**known(cls, row) | {"modified_at": None if at is None else moment(at)})


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image that is checked and mounted, and what its own configuration says."""

    name: str
    key: str
    size_bytes: int
    mounted: bool
    user: str
    workdir: str
    labels: dict[str, str]

    @classmethod
    def from_json(cls, row: Json) -> Self:
        return cls(**known(cls, row))


@dataclass(frozen=True, slots=True)
class Prefetched:
    name: str
    mounted: bool
    failure: SandboxdError | None

    @classmethod
    def from_json(cls, row: Json) -> Self:
        failure = row.get("failure")
        return cls(
            row["name"], row["mounted"], None if failure is None else error_from_json(failure)
        )


@dataclass(frozen=True, slots=True)
class Node:
    """The node itself. ``raw`` holds all that it said, what this version knows no name for too."""

    name: str
    version: str
    ready: bool
    sandboxes: dict[str, int]
    max_sandboxes: int
    max_ttl_s: float
    max_timeout_s: float
    max_output_bytes: int
    network: Json
    """``allow``, ``full``, ``run_network``, ``ipv6``, ``bandwidth_mbit``, and why there is none."""
    default_limits: Limits
    max_limits: Limits
    features: Json = field(repr=False)
    enforcement: dict[str, str] = field(repr=False)
    capacity: Json = field(repr=False)
    counts: Json = field(repr=False)
    raw: Json = field(repr=False)
    kernel_caps: dict[str, int] = field(default_factory=dict, repr=False)
    """What a sandbox may hold of what no cgroup counts."""
    cpus: str = ""
    """Those that ``limits["cpuset"]`` may name."""
    admission: Json = field(default_factory=dict, repr=False)
    """What is promised of what there is, and why nothing more is taken on, if so."""
    mode: str = "service"
    """``rootless`` where an ordinary user started it."""
    ids: str = "range"
    """``single`` where a sandbox has its root and no other user."""
    cgroup: str = ""
    """``v1``, ``v2`` or ``watchdog``: what holds memory and processes."""

    @classmethod
    def from_json(cls, row: Json) -> Self:
        limits = {
            name: Limits(**known(Limits, row[name])) for name in ("default_limits", "max_limits")
        }
        return cls(**known(cls, row) | limits | {"raw": row})


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def decoded(text: str, encoding: str) -> bytes:
    return binascii.a2b_base64(text) if encoding == "base64" else text.encode()


def known(kind: Any, row: Json) -> Json:
    """The fields that ``kind`` has."""
    return {name: row[name] for name in _names(kind) & row.keys()}


@functools.cache
def _names(kind: Any) -> frozenset[str]:
    return frozenset(one.name for one in fields(kind))


# For classes that have a method ``list``.
Events = list[Event]
ExecResults = list[ExecResult | SandboxdError]
Images = list[Image]
Infos = list[SandboxInfo]
Many = list[T | SandboxdError]
"""Each in its place, or its error."""
Prefetches = list[Prefetched]
Snapshots = list[Snapshot]
