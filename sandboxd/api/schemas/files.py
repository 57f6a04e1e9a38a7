"""Bodies, answers and parameters of the routes on files.

Names in a sandbox are bytes. In an answer ``path`` is text, in which what is no UTF-8 is replaced;
then ``path_base64`` (URL-safe base64 of the bytes) is given too, and wherever a path is asked for
it can be given in the place of ``path``.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote_to_bytes

from fastapi import Query, Request
from pydantic import AfterValidator, Field, StringConstraints, model_validator

from sandboxd.api.schemas.base import PATH_BYTES_MAX, AbsolutePath, Answer, Body, User
from sandboxd.errors import RequestError
from sandboxd.init.protocol import PATTERNS_MAX
from sandboxd.model import FileEntry
from sandboxd.runtime.file_trees import DEPTH_MAX, TYPES

LIST_LIMIT: Final = 1000
LIST_LIMIT_MAX: Final = 10_000
PATTERN_MAX: Final = 512

FileType = Literal[
    "file", "directory", "symlink", "fifo", "socket", "char-device", "block-device", "unknown"
]


def decode_path(text: str) -> bytes:
    """The bytes of a ``path_base64``. Raises ValueError for what is no absolute path in base64."""
    try:
        path = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except binascii.Error as error:
        raise ValueError(f"is no base64: {error}") from error
    if not path.startswith(b"/"):
        raise ValueError("must be an absolute path")
    if len(path) > PATH_BYTES_MAX:
        raise ValueError(f"has more than {PATH_BYTES_MAX} bytes")
    if b"\0" in path:
        raise ValueError("must not hold a NUL byte")
    return path


def _checked(text: str) -> str:
    decode_path(text)
    return text


def _pattern(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL byte")
    return text


PathBase64 = Annotated[str, StringConstraints(max_length=6000), AfterValidator(_checked)]
Mode = Annotated[str, StringConstraints(pattern=r"^[0-7]{3,4}$")]
Pattern = Annotated[
    str, StringConstraints(min_length=1, max_length=PATTERN_MAX), AfterValidator(_pattern)
]

# --- query parameters ------------------------------------------------------------------------

AsUser = Annotated[User | None, Query(description="The sandbox's user if left out")]
Include = Annotated[
    list[Pattern],
    Query(
        max_length=PATTERNS_MAX // 2,
        description="Only what matches one of these, and what is in such a directory. `*` and `?`"
        " keep to one name, `**` goes over several; a pattern without a slash is compared with the"
        " last name, else with the whole path below the directory",
    ),
]
Exclude = Annotated[
    list[Pattern],
    Query(max_length=PATTERNS_MAX // 2, description="Not what matches, nor what is in it"),
]
Depth = Annotated[int, Query(ge=1, le=DEPTH_MAX, description="Levels below the directory")]
Limit = Annotated[int, Query(ge=1, le=LIST_LIMIT_MAX, description="Entries at most")]


def asked_path(
    request: Request,
    path: Annotated[
        AbsolutePath | None, Query(description="Absolute path in the sandbox, in UTF-8")
    ] = None,
    path_base64: Annotated[
        PathBase64 | None, Query(description="The same as base64, for names that are no UTF-8")
    ] = None,
) -> bytes:
    """Dependency: the path that the query gives."""
    if (path is None) == (path_base64 is None):
        raise RequestError("query: one of path and path_base64 is needed", field="query.path")
    if path_base64 is not None:
        return decode_path(path_base64)
    assert path is not None
    if "\ufffd" in path:
        _refuse_replaced(request)
    return path.encode()


def _refuse_replaced(request: Request) -> None:
    """Starlette puts U+FFFD for what is no UTF-8: another file than the one that was asked for."""
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError:
        raise RequestError(
            "query.path: is no UTF-8", field="query.path", hint="give its bytes as path_base64"
        ) from None


# --- bodies ----------------------------------------------------------------------------------


class PathBody(Body):
    path: AbsolutePath | None = None
    path_base64: PathBase64 | None = None
    """In the place of ``path``, for names that are no UTF-8."""
    user: User | None = None
    """The sandbox's user if left out."""

    @model_validator(mode="after")
    def _one_path(self) -> PathBody:
        if (self.path is None) == (self.path_base64 is None):
            raise ValueError("one of path and path_base64 is needed")
        return self

    def raw_path(self) -> bytes:
        return _raw(self.path, self.path_base64)


def _raw(path: str | None, path_base64: str | None) -> bytes:
    if path_base64 is not None:
        return decode_path(path_base64)
    assert path is not None
    return path.encode()


class MkdirBody(PathBody):
    path: AbsolutePath | None = Field(default=None, examples=["/work/out"])
    mode: Mode | None = Field(default=None, examples=["0755"])
    """Octal; 0755 if left out."""
    parents: bool = True
    """Make missing directories above it, and take one that is there for done."""


class MoveBody(Body):
    source: AbsolutePath | None = Field(default=None, examples=["/work/out.tmp"])
    source_base64: PathBase64 | None = None
    destination: AbsolutePath | None = Field(default=None, examples=["/work/out"])
    """Its new name; never the directory to put it in."""
    destination_base64: PathBase64 | None = None
    overwrite: bool = False
    """Replace what is there: a file, a link or an empty directory."""
    parents: bool = True
    """Make missing directories above the destination."""
    user: User | None = None

    @model_validator(mode="after")
    def _two_paths(self) -> MoveBody:
        for name in ("source", "destination"):
            if (getattr(self, name) is None) == (getattr(self, f"{name}_base64") is None):
                raise ValueError(f"one of {name} and {name}_base64 is needed")
        return self

    def raw_paths(self) -> tuple[bytes, bytes]:
        return (
            _raw(self.source, self.source_base64),
            _raw(self.destination, self.destination_base64),
        )


class ChmodBody(PathBody):
    path: AbsolutePath | None = Field(default=None, examples=["/work/run.sh"])
    mode: Mode = Field(examples=["0755"])
    recursive: bool = False


class ChownBody(PathBody):
    path: AbsolutePath | None = Field(default=None, examples=["/work"])
    owner: User = Field(examples=["agent:agent"])
    """``name`` or ``uid``, with ``:group`` to change that too."""
    recursive: bool = False


# --- answers ---------------------------------------------------------------------------------


class FileEntryAnswer(Answer):
    path: str = Field(examples=["/work/setup.py"])
    path_base64: str | None
    """The path's bytes; null unless they are no UTF-8."""
    name: str
    type: FileType
    size_bytes: int
    mode: str = Field(examples=["0644"])
    uid: int
    gid: int
    mtime_ns: int
    links: int
    inode: int
    target: str | None
    """Where a symlink leads, as it is written in it."""
    target_base64: str | None
    error: str | None = Field(examples=["EACCES"])
    """Why a directory was not looked into."""


class FileListAnswer(Answer):
    path: str
    entries: list[FileEntryAnswer]
    """Sorted by path, byte by byte."""
    truncated: bool
    """A bound was reached: there may be more."""


class ChangedAnswer(Answer):
    entry: FileEntryAnswer
    changed: int
    """Entries changed, itself included."""


class RemovedAnswer(Answer):
    removed: int
    """Entries that are gone, itself included; 0 if it was not there."""


class UnpackedAnswer(Answer):
    path: str
    members: int
    """Of the archive, those that the filters left out not counted."""


def text_of(raw: bytes) -> tuple[str, str | None]:
    """``(text, base64 or None)``."""
    try:
        return raw.decode(), None
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace"), base64.urlsafe_b64encode(raw).decode()


def entry_answer(entry: FileEntry) -> dict[str, Any]:
    path, path_base64 = text_of(entry.path)
    target, target_base64 = (None, None) if entry.target is None else text_of(entry.target)
    return {
        "path": path,
        "path_base64": path_base64,
        "name": path.rstrip("/").rpartition("/")[2] or "/",
        "type": entry.type,
        "size_bytes": entry.size_bytes,
        "mode": f"{entry.mode:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "mtime_ns": entry.mtime_ns,
        "links": entry.links,
        "inode": entry.inode,
        "target": target,
        "target_base64": target_base64,
        "error": entry.error,
    }


def type_bits(names: list[Any]) -> int:
    """For ``FileFilter.types``."""
    bits = 0
    for name in names:
        bits |= 1 << (TYPES[name] >> 12)
    return bits or (1 << 16) - 1


class FileAnswer(Answer):
    path: str
    size_bytes: int
    mode: str = Field(examples=["0644"])
    uid: int
    gid: int
    mtime_ns: int
    """Nanoseconds since the epoch; a number, as a program may set what no calendar has."""
