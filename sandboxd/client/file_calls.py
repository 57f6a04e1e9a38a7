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
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote, urlencode

from sandboxd.client.calls import ANSWER_S, BYTES, JSON, ROOT, Call
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


@dataclass(frozen=True, slots=True)
class Listing:
    """Sorted by path. ``truncated``: a bound was reached, there may be more."""

    entries: list[FileEntry]
    truncated: bool

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        return cls([FileEntry.from_json(one) for one in row["entries"]], row["truncated"])


def read(sandbox: str, path: str, user: str | None) -> Call[bytes]:
    return Call("GET", _url(sandbox, "files", _at(path), user=user), bytes, repeatable=True)


def write(
    sandbox: str,
    path: str,
    data: bytes | None,
    size_bytes: int,
    *,
    user: str | None,
    mode: int | None,
    parents: bool,
) -> Call[FileInfo]:
    """``data`` None: the driver streams ``size_bytes``. Replaces the file in one step."""
    octal = None if mode is None else f"{mode:04o}"
    return Call(
        "PUT",
        _url(sandbox, "files", _at(path), user=user, mode=octal, parents=None if parents else "0"),
        _parser(FileInfo.from_json),
        data,
        BYTES if data is not None else (*BYTES, ("Content-Length", str(size_bytes))),
        repeatable=data is not None,
    )


def stat(sandbox: str, path: str, follow: bool, user: str | None) -> Call[FileEntry]:
    url = _url(sandbox, "files/stat", _at(path), user=user, follow="1" if follow else None)
    return Call("GET", url, _parser(FileEntry.from_json), repeatable=True)


def list_dir(
    sandbox: str, path: str, recursive: bool, limit: int, user: str | None
) -> Call[Listing]:
    deep = "1" if recursive else None
    url = _url(sandbox, "files/list", _at(path), user=user, recursive=deep, limit=str(limit))
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
    sandbox: str, source: str, destination: str, overwrite: bool, user: str | None
) -> Call[FileEntry]:
    body = _at(source, "source") | _at(destination, "destination")
    body |= {"overwrite": overwrite, "user": user}
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
    sandbox: str, path: str, include: Sequence[str], exclude: Sequence[str], user: str | None
) -> Call[None]:
    """Answered by a tar stream."""
    url = _url(sandbox, "archive", _at(path), user=user, include=include, exclude=exclude)
    return Call("GET", url, lambda _: None, repeatable=True)


def unpack(sandbox: str, path: str, owner: str | None, user: str | None) -> Call[int]:
    """The driver streams a tar; answered by the number of its members."""
    url = _url(sandbox, "archive", _at(path), user=user, owner=owner)
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
