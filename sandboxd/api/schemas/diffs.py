"""Answers of the routes that say what changed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from sandboxd.api.schemas.base import Answer
from sandboxd.api.schemas.files import FileType, text_of
from sandboxd.runtime.diffs import DiffEntry


class DiffEntryAnswer(Answer):
    path: str
    path_base64: str | None
    """Where the path is no UTF-8."""
    change: Literal["added", "changed", "removed"]
    what: list[Literal["type", "mode", "owner", "xattrs", "content", "target", "device", "links"]]
    """Of one that is changed: what differs. `type` stands alone; `links` is whether it shares its
    file with as many names as before."""
    type: FileType
    """What it is now; of one that is removed, what it was."""
    mode: str = Field(examples=["0644"])
    uid: int
    gid: int
    size_bytes: int
    """Of a file; 0 for all else."""
    target: str | None
    """Of a symlink."""
    target_base64: str | None


class DiffAnswer(Answer):
    changes: list[DiffEntryAnswer]
    """A directory before what is in it, names in the order of their bytes."""
    more: bool
    next: str | None
    """Give it as `after_base64` to get what follows; null at the end."""


def diff_entry(entry: DiffEntry) -> dict[str, Any]:
    path, path_base64 = text_of(entry.path)
    target, target_base64 = (None, None) if entry.target is None else text_of(entry.target)
    return {
        "path": path,
        "path_base64": path_base64,
        "change": entry.change,
        "what": list(entry.what),
        "type": entry.type,
        "mode": f"{entry.mode:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "size_bytes": entry.size_bytes,
        "target": target,
        "target_base64": target_base64,
    }
