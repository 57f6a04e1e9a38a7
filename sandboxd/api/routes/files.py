"""Files of a sandbox: read, written, looked at and changed inside it as the asked user."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, file_answer
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.body_limit import content_length
from sandboxd.api.disconnect import ClientWatch
from sandboxd.api.exception_handlers import documented, error_response
from sandboxd.api.file_streams import (
    OCTETS,
    StreamAnswer,
    byte_range,
    file_headers,
    matches,
    pieces,
    span,
)
from sandboxd.api.schemas.base import User
from sandboxd.api.schemas.files import (
    LIST_LIMIT,
    AsUser,
    ChangedAnswer,
    ChmodBody,
    ChownBody,
    Depth,
    Exclude,
    FileAnswer,
    FileEntryAnswer,
    FileListAnswer,
    Limit,
    MkdirBody,
    MoveBody,
    Pattern,
    RemovedAnswer,
    asked_path,
    entry_answer,
    text_of,
    type_bits,
)
from sandboxd.errors import BodyTooLarge, RangeNotSatisfiable, RequestError
from sandboxd.init.protocol import PATTERNS_MAX, SIZE_MAX, FileFilter
from sandboxd.runtime.file_operation import FileOperation
from sandboxd.runtime.file_trees import FileTrees, Listing
from sandboxd.runtime.files import FileRead, FileWrite
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.sandbox import Sandbox

router = APIRouter(prefix="/v1/sandboxes", tags=["files"])

DISCARD_MAX: Final = 64 << 20
"""Of an upload that failed early, read and thrown away so that the client hears why; beyond that
the connection is closed on it."""

Path = Annotated[bytes, Depends(asked_path)]
FindType = Literal["file", "directory", "symlink", "fifo", "socket", "char-device", "block-device"]
Seconds = Annotated[float, Query(ge=-9e9, le=9e9, description="Unix time")]
Bytes = Annotated[int, Query(ge=0, lt=1 << 63)]

FILE_ERRORS: Final = (
    errors.RequestError,
    errors.UserNotFound,
    errors.UserNotMapped,
    errors.FileError,
    errors.FileNotFound,
    errors.FileAccessDenied,
    errors.SandboxNotFound,
    errors.SandboxDead,
    errors.SandboxLost,
    errors.SandboxExclusive,
    errors.PidsExhausted,
    errors.TooManyExecs,
    errors.FileStalled,
    errors.FileKilled,
    errors.NodeUnavailable,
)
OCTET_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}},
    }
}
_BYTES: Final = {
    "description": "The file's bytes",
    "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}},
}


def sandbox_of(request: Request, sandbox_id: str) -> Sandbox:
    runtime: Runtime = request.app.state.runtime
    return runtime.find(sandbox_id)


# --- read and write --------------------------------------------------------------------------


@router.get(
    "/{sandbox_id}/files",
    response_class=Response,
    responses={
        200: _BYTES,
        206: {**_BYTES, "description": "The asked part of them"},
        304: {"description": "The file is still that of `If-None-Match`"},
        **documented(*FILE_ERRORS, errors.NotARegularFile, errors.RangeNotSatisfiable),
    },
)
async def read_file(request: Request, sandbox_id: str, path: Path, user: AsUser = None) -> Response:
    """A regular file's bytes, or the part that `Range` names. A large one that cannot be read to
    its end breaks the connection off, as its head is on the way by then."""
    sandbox = sandbox_of(request, sandbox_id)
    who = user or sandbox.user
    wanted = byte_range(request.headers.get("range"))
    if wanted is None:
        read = await FileRead.open(sandbox.control(), user=who, path=path)
    else:
        read = await FileRead.open(
            sandbox.control(),
            user=who,
            path=path,
            offset=wanted.offset,
            length=wanted.length,
            suffix=wanted.suffix,
        )
    headers = file_headers(read)
    tag = headers.get("etag")
    if tag and matches(request.headers.get("if-none-match", ""), tag):
        read.close()
        return Response(None, 304, headers)
    still = request.headers.get("if-range")
    if wanted and (not read.info.size_bytes or (still is not None and still != tag)):
        # What has no size has no parts, and of another file than the client's none is wanted.
        read.close()
        wanted = None
        read = await FileRead.open(sandbox.control(), user=who, path=path)
        headers = file_headers(read)
    size = read.info.size_bytes
    length: int | None = size or None
    status = 200
    if wanted is not None:
        part = span(wanted, size)
        if part is None:
            read.close()
            error = RangeNotSatisfiable(f"the file has {size} bytes", size_bytes=size)
            return error_response(error, {"content-range": f"bytes */{size}"})
        offset, length = part
        status = 206
        headers["content-range"] = f"bytes {offset}-{offset + length - 1}/{size}"
    if read.complete and length in (None, len(read.head)):
        with read:
            return Response(read.head, status, headers, OCTETS)
    if length is not None:
        headers["content-length"] = str(length)
    return StreamAnswer(read, pieces(read), status=status, headers=headers)


@router.head(
    "/{sandbox_id}/files",
    response_class=Response,
    responses={
        200: {"description": "What GET would tell of the file, without its bytes"},
        **documented(*FILE_ERRORS, errors.NotARegularFile),
    },
)
async def head_file(request: Request, sandbox_id: str, path: Path, user: AsUser = None) -> Response:
    """A regular file's size, mode, owner and time as headers, if the user may read it."""
    sandbox = sandbox_of(request, sandbox_id)
    who = user or sandbox.user
    with await FileRead.open(sandbox.control(), user=who, path=path, length=0) as read:
        headers = file_headers(read)
        if read.info.size_bytes:
            headers["content-length"] = str(read.info.size_bytes)
        return Response(None, 200, headers, OCTETS)


@router.put(
    "/{sandbox_id}/files",
    response_model=FileAnswer,
    responses=documented(*FILE_ERRORS, errors.NotARegularFile, errors.DiskFull, BodyTooLarge),
    openapi_extra=OCTET_BODY,
)
async def write_file(
    *,
    request: Request,
    sandbox_id: str,
    path: Path,
    user: AsUser = None,
    mode: Annotated[
        str | None,
        Query(pattern="^[0-7]{3,4}$", description="Octal; that of the file it replaces, or 0644"),
    ] = None,
    owner: Annotated[
        User | None,
        Query(description="`name|uid[:name|gid]`; that of the file it replaces, or the user's"),
    ] = None,
    parents: Annotated[bool, Query(description="Make missing directories above it")] = True,
) -> Response:
    """Write a whole file, replacing what was there in one step: readers see the old or the new. An
    upload that breaks off changes nothing."""
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    most = runtime.config.max_file_bytes
    length = content_length(request.scope)
    if length is not None and length > most:
        raise too_large(most)
    with FileWrite.open(
        sandbox.control(),
        user=user or sandbox.user,
        path=path,
        length=length,
        length_max=most,
        mode=None if mode is None else int(mode, 8),
        owner=owner or "",
        parents=parents,
    ) as write:
        await feed(request.stream(), write, most)
        info = await write.finish()
    return JsonAnswer(file_answer(text_of(path)[0], info))


def too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"an upload has {most} bytes at most", max_bytes=most)


async def feed(body: AsyncIterator[bytes], write: FileOperation, most: int) -> None:
    """Pass a request's body on. Raises BodyTooLarge, and ClientDisconnect where it breaks off."""
    taken = discarded = 0
    wanted = True
    async for data in body:
        taken += len(data)
        if taken > most:
            raise too_large(most)
        if wanted:
            wanted = await write.write(data)
        if not wanted:
            discarded += len(data)
            if discarded > DISCARD_MAX:
                break


# --- look ------------------------------------------------------------------------------------


@contextmanager
def _trees(request: Request, sandbox: Sandbox, user: str | None) -> Iterator[FileTrees]:
    """What a client asks is given up when it goes. Its body must be read before."""
    running: list[FileOperation] = []

    def gone() -> None:
        for operation in running:
            operation.abandon()

    with ClientWatch(request.receive, gone):
        yield FileTrees(sandbox.control(), user or sandbox.user, running.append)


def _listed(path: bytes, listing: Listing) -> Response:
    return JsonAnswer(
        {
            "path": text_of(path)[0],
            "entries": [entry_answer(one) for one in listing.entries],
            "truncated": listing.truncated,
        }
    )


@router.get(
    "/{sandbox_id}/files/stat",
    response_model=FileEntryAnswer,
    responses=documented(*FILE_ERRORS),
)
async def stat_file(
    request: Request,
    sandbox_id: str,
    path: Path,
    follow: Annotated[bool, Query(description="A symlink's target instead of itself")] = False,
    user: AsUser = None,
) -> Response:
    """What is at a path, of whatever type."""
    with _trees(request, sandbox_of(request, sandbox_id), user) as trees:
        return JsonAnswer(entry_answer(await trees.stat(path, follow=follow)))


@router.get(
    "/{sandbox_id}/files/list",
    response_model=FileListAnswer,
    responses=documented(*FILE_ERRORS, errors.NotADirectory),
)
async def list_files(
    *,
    request: Request,
    sandbox_id: str,
    path: Path,
    recursive: Annotated[bool, Query(description="What is in its directories too")] = False,
    depth: Annotated[Depth | None, Query()] = None,
    limit: Limit = LIST_LIMIT,
    user: AsUser = None,
) -> Response:
    """What is in a directory. Symlinks in it are not followed; other file systems (`/proc` below
    `/`) are named and not entered."""
    levels = (depth or 2048) if recursive else 1
    with _trees(request, sandbox_of(request, sandbox_id), user) as trees:
        return _listed(path, await trees.list(path, depth=levels, limit=limit))


@router.get(
    "/{sandbox_id}/files/find",
    response_model=FileListAnswer,
    responses=documented(*FILE_ERRORS, errors.NotADirectory),
)
async def find_files(
    *,
    request: Request,
    sandbox_id: str,
    path: Path,
    pattern: Annotated[
        list[Pattern],
        Query(
            max_length=PATTERNS_MAX // 2,
            description="Any of these. `*`, `?` and `[a-z]` keep to one name, `**` goes over"
            " several. A pattern without a slash is compared with the last name, else with the"
            " whole path below the directory: `src/**/*.py`",
        ),
    ] = [],  # noqa: B006
    exclude: Exclude = [],  # noqa: B006
    type: Annotated[list[FindType], Query(description="Any of these")] = [],  # noqa: B006
    min_size: Annotated[Bytes, Query(description="Bytes at least")] = 0,
    max_size: Annotated[Bytes | None, Query(description="Bytes at most")] = None,
    modified_after: Seconds | None = None,
    modified_before: Seconds | None = None,
    depth: Depth = 2048,
    limit: Limit = LIST_LIMIT,
    user: AsUser = None,
) -> Response:
    """Entries below a directory for which all that is given holds."""
    wanted = FileFilter(
        include=pattern,
        exclude=exclude,
        types=type_bits(list(type)),
        size_min=min_size,
        size_max=SIZE_MAX if max_size is None else max_size,
        mtime_min_ns=_nanoseconds(modified_after, -(1 << 63)),
        mtime_max_ns=_nanoseconds(modified_before, (1 << 63) - 1),
    )
    with _trees(request, sandbox_of(request, sandbox_id), user) as trees:
        return _listed(path, await trees.list(path, depth=depth, limit=limit, filter=wanted))


def _nanoseconds(seconds: float | None, otherwise: int) -> int:
    if seconds is None or not math.isfinite(seconds):
        return otherwise
    return int(seconds * 1_000_000_000)


# --- change ----------------------------------------------------------------------------------


def _check_name(path: bytes) -> None:
    """Raises RequestError for a path whose last part names nothing that can be made or removed."""
    if path.rstrip(b"/").rpartition(b"/")[2] in (b"", b".", b".."):
        raise RequestError(f"{text_of(path)[0]!r} names no entry of a directory", field="path")


@router.delete(
    "/{sandbox_id}/files",
    response_model=RemovedAnswer,
    responses=documented(
        *FILE_ERRORS, errors.DirectoryNotEmpty, errors.FileBusy, errors.FileChanged
    ),
)
async def remove_file(
    *,
    request: Request,
    sandbox_id: str,
    path: Path,
    recursive: Annotated[bool, Query(description="A directory with all that is in it")] = False,
    missing_ok: Annotated[bool, Query(description="What is not there is no error")] = False,
    user: AsUser = None,
) -> Response:
    """Remove a file, a link (itself, not its target) or a directory. What cannot be removed ends
    it, and is named; what was removed before that is gone."""
    _check_name(path)
    with _trees(request, sandbox_of(request, sandbox_id), user) as trees:
        try:
            removed = await trees.remove(path, recursive=recursive)
        except errors.FileNotFound:
            if not missing_ok:
                raise
            removed = 0
    return JsonAnswer({"removed": removed})


@router.post(
    "/{sandbox_id}/files/mkdir",
    response_model=FileEntryAnswer,
    openapi_extra=json_body(MkdirBody),
    responses=documented(*FILE_ERRORS, errors.FileExists, errors.DiskFull),
)
async def make_directory(request: Request, sandbox_id: str) -> Response:
    """Make a directory, and what is missing above it."""
    body = await parse(MkdirBody, request)
    path = body.raw_path()
    _check_name(path)
    mode = None if body.mode is None else int(body.mode, 8)
    with _trees(request, sandbox_of(request, sandbox_id), body.user) as trees:
        return JsonAnswer(entry_answer(await trees.mkdir(path, mode=mode, parents=body.parents)))


@router.post(
    "/{sandbox_id}/files/move",
    response_model=FileEntryAnswer,
    openapi_extra=json_body(MoveBody),
    responses=documented(
        *FILE_ERRORS,
        errors.FileExists,
        errors.DirectoryNotEmpty,
        errors.CrossDevice,
        errors.FileBusy,
        errors.DiskFull,
    ),
)
async def move_file(request: Request, sandbox_id: str) -> Response:
    """Give a file or directory another name, in one step. To another file system a file is copied,
    and is whole there before it is gone here; for a directory, and for one that comes from the
    image, there is no such step: `cross-device`, as rename(2) has it under Docker."""
    body = await parse(MoveBody, request)
    source, destination = body.raw_paths()
    _check_name(source)
    _check_name(destination)
    with _trees(request, sandbox_of(request, sandbox_id), body.user) as trees:
        entry = await trees.move(
            source, destination, overwrite=body.overwrite, parents=body.parents
        )
    return JsonAnswer(entry_answer(entry))


@router.post(
    "/{sandbox_id}/files/chmod",
    response_model=ChangedAnswer,
    openapi_extra=json_body(ChmodBody),
    responses=documented(*FILE_ERRORS, errors.DiskFull),
)
async def change_mode(request: Request, sandbox_id: str) -> Response:
    """Set a mode, of a whole tree if asked. A symlink at the path is followed, those below it are
    left as they are."""
    body = await parse(ChmodBody, request)
    with _trees(request, sandbox_of(request, sandbox_id), body.user) as trees:
        entry, changed = await trees.chmod(
            body.raw_path(), mode=int(body.mode, 8), recursive=body.recursive
        )
    return JsonAnswer({"entry": entry_answer(entry), "changed": changed})


@router.post(
    "/{sandbox_id}/files/chown",
    response_model=ChangedAnswer,
    openapi_extra=json_body(ChownBody),
    responses=documented(*FILE_ERRORS, errors.DiskFull),
)
async def change_owner(request: Request, sandbox_id: str) -> Response:
    """Set an owner, of a whole tree if asked. A symlink at the path is followed; those below it are
    changed themselves. The owner is looked up in the sandbox."""
    body = await parse(ChownBody, request)
    with _trees(request, sandbox_of(request, sandbox_id), body.user) as trees:
        entry, changed = await trees.chown(
            body.raw_path(), owner=body.owner, recursive=body.recursive
        )
    return JsonAnswer({"entry": entry_answer(entry), "changed": changed})
