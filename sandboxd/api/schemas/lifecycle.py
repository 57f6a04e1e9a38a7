"""Bodies and answers of what is done to a sandbox between its making and its end, and to images."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sandboxd.api.schemas.base import Answer, Body, ImageName
from sandboxd.api.schemas.sandboxes import FailureAnswer

PREFETCH_MAX = 256


class RenewBody(Body):
    ttl_s: float | None = Field(default=None, gt=0, le=31_536_000, examples=[1800])
    """Seconds from now; those it was made with if left out."""


class CpuUsage(Answer):
    usage_s: float | None
    user_s: float | None
    system_s: float | None
    periods: int | None
    throttled_periods: int | None
    """Of the limit's periods of 100 ms, those in which it had to wait."""
    throttled_s: float | None


class MemoryUsage(Answer):
    used_bytes: int | None
    """The writable layer's pages and the page cache included; without both where a watchdog holds
    memory, which saw it last some moments ago."""
    peak_bytes: int | None
    limit_bytes: int
    """``memory_mb`` and ``disk_mb`` together: the layer lies in memory. ``memory_mb`` alone where a
    watchdog holds it."""
    oom_kills: int | None


class PidsUsage(Answer):
    count: int | None
    limit: int
    refused: int | None
    """Forks that the limit refused."""


class DiskUsage(Answer):
    used_bytes: int | None
    size_bytes: int | None
    used_inodes: int | None
    inodes: int | None


class IoUsage(Answer):
    """Of block devices; the writable layer is memory and is none."""

    read_bytes: int | None
    written_bytes: int | None


class StatsAnswer(Answer):
    """What a sandbox uses now, and has used. A figure that the node cannot give is null."""

    id: str
    at: str
    cpu: CpuUsage
    memory: MemoryUsage
    pids: PidsUsage
    disk: DiskUsage
    io: IoUsage


class EventAnswer(Answer):
    seq: int
    """Counts from 1 within the sandbox; a gap is what the bounded ring has lost."""
    at: str
    kind: str = Field(examples=["created", "exec-failed", "oom", "paused", "failed"])
    message: str
    detail: dict[str, Any]


class EventList(Answer):
    events: list[EventAnswer]
    """The oldest first."""
    next: int
    """Give it as ``after`` to get what follows."""


class DeletionFailure(FailureAnswer):
    id: str


class DeletedAnswer(Answer):
    deleted: list[str]
    """No process of these lives."""
    pending: list[str]
    """Not done within the time; their deletion goes on by itself."""
    failed: list[DeletionFailure]
    """Tried again by itself."""


class PrefetchBody(Body):
    images: Annotated[list[ImageName], Field(min_length=1, max_length=PREFETCH_MAX)] = Field(
        examples=[["debian-python", "swe/django"]]
    )


class PrefetchedImage(Answer):
    name: str
    mounted: bool
    failure: FailureAnswer | None


class PrefetchAnswer(Answer):
    images: list[PrefetchedImage]
    """In the order asked for; one that failed does not stop the others."""
