"""Files and directories of a sandbox: the requests and what comes back. No input or output here.

Names in a sandbox are bytes. Here they are text as ``os.fsdecode`` makes it: what is no UTF-8 is in
surrogates, and goes back as the same bytes.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypedDict, TypeVar
from urllib.parse import quote, urlencode

from sandboxd.client.calls import ANSWER_S, BYTES, JSON, ROOT, Call
from sandboxd.client.failures import ClientMisused
from sandboxd.client.results import FileInfo, known

T = TypeVar("T")

TREE_S: Final = 3600.0
"""For one answer about a whole tree, which takes what the tree takes."""
LIST_MAX: Final = 10_000
TAR: Final = (("Content-Type", "application/x-tar"),)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A name in a sandbox, of whatever type."""

    path: str
    type: str
    """``file``, ``directory``, ``symlink``, ``fifo``, ``socket``, ``char-device`` …"""
    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    links: int
    inode: int
    target: str | None
    """Where a symlink leads, as it is written in it."""
    error: str | None
    """Why a directory was not looked into."""

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2] or "/"

    @property
    def is_dir(self) -> bool:
        return self.type == "directory"

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        own = {
            "path": _name(row["path"], row.get("path_base64")),
            "target": _name(row["target"], row.get("target_base64")),
            "mode": int(row["mode"], 8),
        }
        return cls(**known(cls, row) | own)


class FindOptions(TypedDict, total=False):
    """What an entry must be like to be found: all that is given."""

    pattern: str | Sequence[str]
    """Any of these. ``*``, ``?`` and ``[a-z]`` keep to one name, ``**`` goes over several; without
    a slash it is compared with the last name, else with the whole path below the directory."""
    exclude: str | Sequence[str]
    """None of these, nor what is in such a directory."""
    type: str | Sequence[str]
    """As ``FileEntry.type``; any of these."""
    min_size: int
    max_size: int
    modified_after: float
    modified_before: float
    """Unix times."""
    depth: int
    """Levels below the directory."""
    limit: int
    user: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Sorted by path. ``truncated``: a bound was reached, there may be more."""

    entries: list[FileEntry]
    truncated: bool

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        return cls([FileEntry.from_json(one) for one in row["entries"]], row["truncated"])


def read(
    sandbox: str, path: str, user: str | None, offset: int = 0, length: int | None = None
) -> Call[bytes]:
    """From ``offset``, or the last ``-offset`` bytes; ``length`` of them at most."""
    url = _url(sandbox, "files", _at(path), user=user)
    if offset < 0:
        if length is not None:
            raise ClientMisused("a length is for an offset from the beginning")
        return Call("GET", url, bytes, None, (("Range", f"bytes={offset}"),), repeatable=True)
    if length is not None and length < 1:
        raise ClientMisused(f"a length of {length}")
    if not offset and length is None:
        return Call("GET", url, bytes, repeatable=True)
    last = "" if length is None else offset + length - 1
    ranged = (("Range", f"bytes={offset}-{last}"),)
    return Call("GET", url, bytes, None, ranged, repeatable=True)


def write(
    sandbox: str,
    path: str,
    data: bytes | None,
    size_bytes: int,
    *,
    user: str | None,
    mode: int | None,
    owner: str | None,
    parents: bool,
) -> Call[FileInfo]:
    """``data`` None: the driver streams ``size_bytes``. Replaces the file in one step."""
    octal = None if mode is None else f"{mode:04o}"
    return Call(
        "PUT",
        _url(
            sandbox,
            "files",
            _at(path),
            user=user,
            mode=octal,
            owner=owner,
            parents=None if parents else "0",
        ),
        _parser(FileInfo.from_json),
        data,
        BYTES if data is not None else (*BYTES, ("Content-Length", str(size_bytes))),
        repeatable=data is not None,
    )


def stat(sandbox: str, path: str, follow: bool, user: str | None) -> Call[FileEntry]:
    url = _url(sandbox, "files/stat", _at(path), user=user, follow="1" if follow else None)
    return Call("GET", url, _parser(FileEntry.from_json), repeatable=True)


def list_dir(
    sandbox: str, path: str, *, recursive: bool, depth: int | None, limit: int, user: str | None
) -> Call[Listing]:
    given = {
        "recursive": "1" if recursive else None,
        "depth": None if depth is None else str(depth),
        "limit": str(limit),
    }
    url = _url(sandbox, "files/list", _at(path), user=user, **given)
    return Call("GET", url, _parser(Listing.from_json), read_s=TREE_S, repeatable=True)


def find(sandbox: str, path: str, wanted: FindOptions) -> Call[Listing]:
    given: dict[str, str | Sequence[str] | None] = {}
    for name, value in wanted.items():
        if isinstance(value, str):
            given[name] = value
        elif isinstance(value, int | float):
            given[name] = str(value)
        elif isinstance(value, Sequence):
            given[name] = [str(one) for one in value]
    given.setdefault("limit", str(LIST_MAX))
    url = _url(sandbox, "files/find", _at(path), **given)
    return Call("GET", url, _parser(Listing.from_json), read_s=TREE_S, repeatable=True)


def mkdir(
    sandbox: str, path: str, mode: int | None, parents: bool, user: str | None
) -> Call[FileEntry]:
    body = _at(path) | {"parents": parents, "user": user}
    if mode is not None:
        body["mode"] = f"{mode:04o}"
    # With parents, one that is there is done: then it may be asked for twice.
    return _post(sandbox, "mkdir", body, FileEntry.from_json, repeatable=parents)


def move(
    sandbox: str,
    source: str,
    destination: str,
    *,
    overwrite: bool,
    parents: bool,
    user: str | None,
) -> Call[FileEntry]:
    body = _at(source, "source") | _at(destination, "destination")
    body |= {"overwrite": overwrite, "parents": parents, "user": user}
    return _post(sandbox, "move", body, FileEntry.from_json)


def chmod(sandbox: str, path: str, mode: int, recursive: bool, user: str | None) -> Call[int]:
    body = _at(path) | {"mode": f"{mode:04o}", "recursive": recursive, "user": user}
    return _post(sandbox, "chmod", body, lambda row: int(row["changed"]), repeatable=True)


def chown(sandbox: str, path: str, owner: str, recursive: bool, user: str | None) -> Call[int]:
    body = _at(path) | {"owner": owner, "recursive": recursive, "user": user}
    return _post(sandbox, "chown", body, lambda row: int(row["changed"]), repeatable=True)


def remove(
    sandbox: str, path: str, recursive: bool, missing_ok: bool, user: str | None
) -> Call[int]:
    flags = {"recursive": recursive, "missing_ok": missing_ok}
    given = {name: "1" for name, value in flags.items() if value}
    return Call(
        "DELETE",
        _url(sandbox, "files", _at(path), user=user, **given),
        _parser(lambda row: int(row["removed"])),
        read_s=TREE_S,
        repeatable=missing_ok,
    )


def pack(
    sandbox: str,
    path: str,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    skip_unreadable: bool,
    user: str | None,
) -> Call[None]:
    """Answered by a tar stream."""
    skip = "1" if skip_unreadable else None
    url = _url(
        sandbox,
        "archive",
        _at(path),
        user=user,
        include=include,
        exclude=exclude,
        skip_unreadable=skip,
    )
    return Call("GET", url, lambda _: None, repeatable=True)


def unpack(
    sandbox: str,
    path: str,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    owner: str | None,
    parents: bool,
    user: str | None,
) -> Call[int]:
    """The driver streams a tar; answered by the number of its members."""
    url = _url(
        sandbox,
        "archive",
        _at(path),
        user=user,
        include=include,
        exclude=exclude,
        owner=owner,
        parents=None if parents else "0",
    )
    return Call("PUT", url, _parser(lambda row: int(row["members"])), None, TAR, TREE_S)


def _post(
    sandbox: str,
    verb: str,
    body: dict[str, Any],
    make: Callable[[dict[str, Any]], T],
    *,
    repeatable: bool = False,
) -> Call[T]:
    url = _url(sandbox, f"files/{verb}", {})
    data = json.dumps(body).encode()
    return Call("POST", url, _parser(make), data, JSON, max(ANSWER_S, TREE_S), repeatable)


def _url(sandbox: str, what: str, query: dict[str, Any], **more: str | Sequence[str] | None) -> str:
    given = query | {name: value for name, value in more.items() if value}
    url = f"{ROOT}/{quote(sandbox, safe='')}/{what}"
    return f"{url}?{urlencode(given, doseq=True)}" if given else url


def _at(path: str, name: str = "path") -> dict[str, Any]:
    try:
        path.encode()
    except UnicodeEncodeError:
        raw = os.fsencode(path)
        return {f"{name}_base64": base64.urlsafe_b64encode(raw).decode()}
    return {name: path}


def _name(text: str | None, raw: str | None) -> Any:
    return text if raw is None else os.fsdecode(base64.urlsafe_b64decode(raw))


def _parser(make: Callable[[dict[str, Any]], T]) -> Callable[[bytes], T]:
    return lambda body: make(json.loads(body))
