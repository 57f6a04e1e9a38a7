"""Bodies and answers of runs, draining and admission."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from sandboxd.api.schemas.base import Answer, Body
from sandboxd.api.schemas.lifecycle import DeletionFailure
from sandboxd.api.schemas.node import DrainState


class RunBody(Body):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"lease_s": 60, "max_sandboxes": 128}, {"lease_s": 30}]}
    )

    lease_s: float | None = Field(default=None, ge=1, le=604_800)
    """Without a heartbeat for so long the run is ended, with all it has; null: never by itself."""
    max_sandboxes: int | None = Field(default=None, ge=0)
    """At once; 0: no quota; null: the node's default."""
    max_creates_per_s: float | None = Field(default=None, ge=0, le=1_000_000)
    """Creates a second, of which one second's may come at once; 0 and null as above."""


class RunAnswer(Answer):
    name: str = Field(examples=["grpo-17"])
    state: Literal["active", "ended"]
    created_at: str | None
    """When it was set up; null where it is only a name that sandboxes have in common."""
    lease_s: float | None
    expires_at: str | None
    """When its lease runs out without another heartbeat."""
    max_sandboxes: int
    """In effect; 0: no quota."""
    max_creates_per_s: float
    sandboxes: int
    snapshots: int
    waiting: int
    """Creates that wait for room."""


class RunList(Answer):
    runs: list[RunAnswer]
    next: str | None
    """Give it as ``after`` to get the following page; null at the end."""


class RunEndedAnswer(Answer):
    run: str
    deleted: list[str]
    """No process of these sandboxes lives."""
    pending: list[str]
    """Not done within the time; their deletion goes on by itself."""
    failed: list[DeletionFailure]
    """Tried again by itself."""
    snapshots: list[str]
    """Deleted with it."""
    refused: int
    """Creates that waited for room and were sent away."""


class DrainBody(Body):
    deadline_s: float | None = Field(default=None, ge=0, le=604_800, examples=[600])
    """Delete everything that is still there by then; null: let it all come to its own end."""


class DrainAnswer(DrainState):
    sandboxes: int
    """Still there."""
