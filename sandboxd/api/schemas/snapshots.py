"""Bodies and answers of reset, snapshots and rollback."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sandboxd.api.schemas.base import Answer, Body, Word
from sandboxd.api.schemas.sandboxes import SandboxAnswer

SnapshotId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^sn-[a-z2-7]+$")]


class SnapshotBody(Body):
    name: Word = ""
    on_running: Literal["fail", "kill", "copy"] = Field(default="fail", examples=["copy"])
    """With live processes there is no snapshot without copying. ``fail``: `sandbox-running`;
    ``kill`` them first; ``copy`` what was written while they are frozen."""
    processes: bool = False
    """Keep what runs, too. No node offers that: `checkpoint-unsupported`, and `checkpoint` among
    the node's features says why."""
    ttl_s: float | None = Field(default=None, gt=0, le=31_536_000)
    """Seconds after which it is deleted by itself; the sandbox's own if left out."""


class ResetBody(Body):
    snapshot: SnapshotId | None = None
    """To begin from; the bare image if left out."""


class RollbackBody(Body):
    snapshot: SnapshotId


class SnapshotAnswer(Answer):
    id: str = Field(examples=["sn-w5t3d6c2nq4mzk7xq3v4y2a5pe"])
    sandbox: str
    """Where it was taken; that one may be gone."""
    run: str
    name: str
    image: str
    image_key: str
    bytes: int
    """Of all its layers, those below it included, when it was taken. They are memory."""
    created_at: str
    expires_at: str


class SnapshotTaken(SnapshotAnswer):
    how: Literal["frozen", "killed", "copied"]
    frozen_ms: float | None
    """For how long the processes were frozen; null unless it was copied."""


class SnapshotList(Answer):
    snapshots: list[SnapshotAnswer]


class ResetAnswer(SandboxAnswer):
    reset_ms: dict[str, float]
    """Where the milliseconds of the reset went; in its answer ``phases_ms`` is the same."""
