"""Directories of a sandbox as tar streams, in and out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer
from sandboxd.api.body_limit import content_length
from sandboxd.api.exception_handlers import documented
from sandboxd.api.file_streams import StreamAnswer, pieces
from sandboxd.api.routes.files import FILE_ERRORS, Path, feed, too_large
from sandboxd.api.schemas.base import User
from sandboxd.api.schemas.files import AsUser, Exclude, Include, UnpackedAnswer, text_of
from sandboxd.errors import BodyTooLarge, RequestError
from sandboxd.init.protocol import FileFilter
from sandboxd.runtime.archives import ArchiveRead, ArchiveWrite, gunzip, gzip
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1/sandboxes", tags=["files"])

TAR: Final = "application/x-tar"
TAR_GZ: Final = "application/gzip"
_GZIP_TYPES: Final = (TAR_GZ, "application/x-gzip", "application/x-gtar-compressed")

Compression = Annotated[Literal["none", "gzip"], Query(description="Of the tar stream")]


@router.get(
    "/{sandbox_id}/archive",
    response_class=Response,
    responses={
        200: {
            "description": "A tar of the directory's content, by names relative to it",
            "content": {
                TAR: {"schema": {"type": "string", "format": "binary"}},
                TAR_GZ: {"schema": {"type": "string", "format": "binary"}},
            },
        },
        **documented(*FILE_ERRORS, errors.NotADirectory, errors.FileChanged, errors.TreeTooLarge),
    },
)
async def download_directory(
    *,
    request: Request,
    sandbox_id: str,
    path: Path,
    include: Include = [],  # noqa: B006
    exclude: Exclude = [],  # noqa: B006
    compression: Compression = "none",
    skip_unreadable: Annotated[
        bool, Query(description="Leave out what the user may not read, instead of failing")
    ] = False,
    user: AsUser = None,
) -> Response:
    """What is in a directory, as a tar (ustar, with pax headers where that does not do). Sockets,
    devices and other file systems are left out. One that fails on its way breaks the connection
    off."""
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    read = await ArchiveRead.open(
        sandbox.control(),
        user=user or sandbox.user,
        path=path,
        filter=FileFilter(include=include, exclude=exclude),
        length_max=runtime.config.max_file_bytes,
        skip_unreadable=skip_unreadable,
    )
    if compression == "gzip":
        return StreamAnswer(read, gzip(pieces(read)), media_type=TAR_GZ)
    if read.complete:
        with read:
            return Response(read.head, media_type=TAR)
    return StreamAnswer(read, pieces(read), media_type=TAR)


@router.put(
    "/{sandbox_id}/archive",
    response_model=UnpackedAnswer,
    responses=documented(
        *FILE_ERRORS, errors.NotADirectory, errors.ArchiveInvalid, errors.DiskFull, BodyTooLarge
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                TAR: {"schema": {"type": "string", "format": "binary"}},
                TAR_GZ: {"schema": {"type": "string", "format": "binary"}},
            },
        }
    },
)
async def upload_directory(
    *,
    request: Request,
    sandbox_id: str,
    path: Path,
    include: Include = [],  # noqa: B006
    exclude: Exclude = [],  # noqa: B006
    compression: Annotated[
        Literal["none", "gzip"] | None,
        Query(description="As Content-Type and Content-Encoding say if left out"),
    ] = None,
    owner: Annotated[
        User | None, Query(description="Of what is made: `name|uid[:name|gid]`; else the user")
    ] = None,
    preserve_owner: Annotated[
        bool, Query(description="Owners as the archive has them, by number")
    ] = False,
    parents: Annotated[bool, Query(description="Make the directory if it is missing")] = True,
    user: AsUser = None,
) -> Response:
    """Put the content of a tar (ustar, pax or GNU) into a directory.

    Files, links and FIFOs replace what is there; directories that are there keep their mode, owner
    and time. Refused as `archive-invalid`: names that are absolute or have `..`, anything beneath a
    symlink, hard links to what is not in the directory, devices, sparse files. Each file is put in
    place whole; what was put in place before a failure stays."""
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    if owner and preserve_owner:
        raise RequestError("owner and preserve_owner exclude each other", field="query.owner")
    most = runtime.config.max_file_bytes
    if (content_length(request.scope) or 0) > most:
        raise too_large(most)
    body: AsyncIterator[bytes] = request.stream()
    if compression == "gzip" or (compression is None and _is_gzip(request)):
        body = gunzip(body)
    with ArchiveWrite.open(
        sandbox.control(),
        user=user or sandbox.user,
        path=path,
        filter=FileFilter(include=include, exclude=exclude),
        length_max=most,
        owner=owner or "",
        keep_owners=preserve_owner,
        parents=parents,
    ) as write:
        await feed(body, write, most)
        members = await write.finish()
    return JsonAnswer({"path": text_of(path)[0], "members": members})


def _is_gzip(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind in _GZIP_TYPES or request.headers.get("content-encoding", "").lower() == "gzip"
