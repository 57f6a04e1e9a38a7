"""Whole files of a sandbox, read and written inside it as the asked user, at constant memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, file_answer
from sandboxd.api.body_limit import content_length
from sandboxd.api.disconnect import ClientWatch
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas import AbsolutePath, FileAnswer, User
from sandboxd.errors import BodyTooLarge, LengthRequired
from sandboxd.runtime.files import FileRead, FileWrite
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1/sandboxes", tags=["files"])

UNSIZED_MAX: Final = 1 << 20
"""An upload without Content-Length is held in memory up to this: its size must be known before its
first byte goes into the sandbox, so that one that breaks off is told from one that ends."""

DISCARD_MAX: Final = 64 << 20
"""Of an upload that failed early, read and thrown away so that the client hears why; beyond that
the connection is closed on it."""

Path = Annotated[AbsolutePath, Query(description="Absolute path of the file in the sandbox")]
AsUser = Annotated[User | None, Query(description="The sandbox's user if left out")]

_ERRORS = (
    errors.RequestError,
    errors.UserNotFound,
    errors.FileError,
    errors.FileNotFound,
    errors.FileAccessDenied,
    errors.NotARegularFile,
    errors.SandboxNotFound,
    errors.SandboxDead,
    errors.SandboxLost,
    errors.PidsExhausted,
    errors.TooManyExecs,
    errors.FileStalled,
    errors.NodeUnavailable,
)


class _FileStream(Response):
    """A file that is still being read. Its pipe is closed however the answer ends."""

    def __init__(self, read: FileRead) -> None:
        super().__init__(media_type="application/octet-stream")
        del self.headers["content-length"]
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = False

        def client_gone() -> None:
            nonlocal gone
            gone = True

        with self._read as read, ClientWatch(receive, client_gone):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": read.head, "more_body": True})
            async for data in read.rest():
                if gone:
                    return
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.get(
    "/{sandbox_id}/files",
    response_class=Response,
    responses={
        200: {
            "description": "The file's bytes",
            "content": {"application/octet-stream": {"schema": {"format": "binary"}}},
        },
        **documented(*_ERRORS),
    },
)
async def read_file(request: Request, sandbox_id: str, path: Path, user: AsUser = None) -> Response:
    """A regular file's bytes. A large one that cannot be read to its end breaks the connection off,
    as its head is on the way by then."""
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    read = await FileRead.open(sandbox.control(), user=user or sandbox.user, path=path)
    if read.info is None:
        return _FileStream(read)
    with read:
        headers = {
            "X-File-Mode": f"{read.info.mode:04o}",
            "X-File-Mtime-Ns": str(read.info.mtime_ns),
        }
        return Response(read.head, 200, headers, "application/octet-stream")


@router.put(
    "/{sandbox_id}/files",
    response_model=FileAnswer,
    responses=documented(*_ERRORS, errors.DiskFull, BodyTooLarge, LengthRequired),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
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
    parents: Annotated[bool, Query(description="Make missing directories above it")] = True,
) -> Response:
    """Write a whole file, replacing what was there in one step: readers see the old or the new."""
    runtime: Runtime = request.app.state.runtime
    sandbox = runtime.find(sandbox_id)
    control = sandbox.control()
    body: AsyncIterator[bytes] = request.stream()
    length = content_length(request.scope)
    if length is None:
        held = await _hold(body)
        length, body = len(held), _once(held)
    if length > runtime.config.max_file_bytes:
        raise BodyTooLarge(
            f"a file has {runtime.config.max_file_bytes} bytes at most",
            max_bytes=runtime.config.max_file_bytes,
        )
    with FileWrite.open(
        control,
        user=user or sandbox.user,
        path=path,
        length=length,
        mode=None if mode is None else int(mode, 8),
        parents=parents,
    ) as write:
        wanted = True
        discarded = 0
        async for data in body:
            if wanted:
                wanted = await write.write(data)
            if not wanted:
                discarded += len(data)
                if discarded > DISCARD_MAX:
                    break
        info = await write.finish()
    return JsonAnswer(file_answer(path, info))


async def _hold(body: AsyncIterator[bytes]) -> bytes:
    held = bytearray()
    async for data in body:
        held += data
        if len(held) > UNSIZED_MAX:
            raise LengthRequired(
                f"an upload of more than {UNSIZED_MAX} bytes needs Content-Length",
                hint="send the file itself and not a generator, or set the header",
            )
    return bytes(held)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
