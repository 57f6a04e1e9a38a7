"""What changed in a sandbox or a snapshot: what is asked for, and what comes of an answer."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from typing import Any, Final, Literal, Self
from urllib.parse import quote, urlencode

from sandboxd.client.address import Headers
from sandboxd.client.calls import Call
from sandboxd.client.results import Json, Snapshot, known

TAR: Final[Headers] = (("Accept", "application/x-tar"),)
EXPORT_S: Final = 1200.0
"""It is made whole before it is answered, and others may be made first."""
READ_S: Final = 120.0
"""A comparison takes a minute at most, and may wait for others."""


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """One path that changed. Names that are no UTF-8 are as ``os.fsdecode`` has them."""

    path: str
    change: Literal["added", "changed", "removed"]
    what: tuple[str, ...]
    """Of one that is changed: ``type`` alone, or any of ``mode``, ``owner``, ``xattrs``,
    ``content``, ``target``, ``device``, ``links``."""
    type: str
    mode: str
    uid: int
    gid: int
    size_bytes: int
    target: str | None

    @classmethod
    def from_json(cls, row: Json) -> Self:
        names = {
            name: row[name] if row[raw] is None else os.fsdecode(base64.urlsafe_b64decode(row[raw]))
            for name, raw in (("path", "path_base64"), ("target", "target_base64"))
        }
        return cls(**known(cls, row) | names | {"what": tuple(row["what"])})


@dataclass(frozen=True, slots=True)
class Diff:
    changes: tuple[DiffEntry, ...]
    """A directory before what is in it."""
    more: bool
    next: str | None
    """Give it as ``after`` to get what follows."""

    @classmethod
    def from_json(cls, row: Json) -> Self:
        changes = tuple(DiffEntry.from_json(one) for one in row["changes"])
        return cls(**known(cls, row) | {"changes": changes})


def of_sandbox(
    sandbox: str, since: Snapshot | str | None, after: str | None, limit: int | None
) -> Call[Diff]:
    return _listed(f"/v1/sandboxes/{quote(sandbox, safe='')}/diff", since, after, limit)


def of_snapshot(
    snapshot: Snapshot | str, since: Snapshot | str | None, after: str | None, limit: int | None
) -> Call[Diff]:
    return _listed(f"/v1/snapshots/{quote(_id(snapshot), safe='')}/diff", since, after, limit)


def tar_of_sandbox(sandbox: str, since: Snapshot | str | None) -> Call[None]:
    """Answered by a tar stream."""
    return _tar(f"/v1/sandboxes/{quote(sandbox, safe='')}/diff", since)


def tar_of_snapshot(snapshot: Snapshot | str, since: Snapshot | str | None) -> Call[None]:
    return _tar(f"/v1/snapshots/{quote(_id(snapshot), safe='')}/diff", since)


def export(snapshot: Snapshot | str) -> Call[None]:
    """Answered by a SIF."""
    url = f"/v1/snapshots/{quote(_id(snapshot), safe='')}/export"
    return Call("POST", url, lambda _: None, read_s=EXPORT_S, repeatable=True)


def _listed(
    path: str, since: Snapshot | str | None, after: str | None, limit: int | None
) -> Call[Diff]:
    url = _url(path, since=_id(since), after_base64=after, limit=limit)
    return Call(
        "GET", url, lambda body: Diff.from_json(json.loads(body)), read_s=READ_S, repeatable=True
    )


def _tar(path: str, since: Snapshot | str | None) -> Call[None]:
    url = _url(path, since=_id(since))
    return Call("GET", url, lambda _: None, None, TAR, READ_S, repeatable=True)


def _id(snapshot: Any) -> Any:
    return snapshot.id if isinstance(snapshot, Snapshot) else snapshot


def _url(path: str, **query: Any) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path
