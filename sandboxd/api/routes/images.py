"""Images: what this node's store has, making some ready ahead of need, and letting go of one."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer, failure_answer, timestamp
from sandboxd.api.bodies import json_body, parse
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas.images import ImageBody, ImageList, PreparedImageAnswer
from sandboxd.api.schemas.lifecycle import PrefetchAnswer, PrefetchBody
from sandboxd.errors import SandboxdError
from sandboxd.images.store import LIST_MAX, NAME_MAX, NAME_PATTERN
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1/images", tags=["images"])

PREFETCH_AT_ONCE: Final = 4
"""Creates that need an image now are not to wait behind a long list."""


@router.get("", response_model=ImageList, responses=documented(errors.NodeUnavailable))
async def list_images(request: Request) -> Response:
    """The images of this node's store by name, and which of them are mounted. Not checked: whether
    one can be used is known once it is prepared."""
    runtime: Runtime = request.app.state.runtime
    users: dict[str, int] = {}
    for mount in runtime.images.mounted():
        users[mount.name] = users.get(mount.name, 0) + mount.users
    known = await runtime.images.store.known()
    answers = [
        {
            "name": image.name,
            "size_bytes": image.size_bytes,
            "modified_at": timestamp(image.modified_at),
            "mounted": image.name in users,
            "users": users.get(image.name, 0),
            "local": runtime.images.is_local(image.name),
        }
        for image in known
    ]
    there = {image.name for image in known}
    # A mounted image outlives its file: its sandboxes go on.
    answers += [
        {
            "name": name,
            "size_bytes": None,
            "modified_at": None,
            "mounted": True,
            "users": count,
            "local": runtime.images.is_local(name),
        }
        for name, count in users.items()
        if name not in there
    ]
    return JsonAnswer({"images": answers, "truncated": len(known) >= LIST_MAX})


@router.post(
    "",
    response_model=PreparedImageAnswer,
    openapi_extra=json_body(ImageBody),
    responses=documented(
        errors.RequestError,
        errors.ImageNotFound,
        errors.ImageInvalid,
        errors.ImageUnavailable,
        errors.ImageUnverified,
        errors.NodeUnavailable,
    ),
)
async def prepare(request: Request) -> Response:
    """Check and mount an image, so that its first sandbox need not wait for that."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(ImageBody, request)
    image, mount = await runtime.images.acquire(body.image)
    runtime.images.release(mount)
    return JsonAnswer(
        {
            "name": image.name,
            "key": image.key,
            "size_bytes": image.size_bytes,
            "mounted": True,
            "user": image.config.user,
            "workdir": image.config.workdir,
            "labels": image.config.labels,
        }
    )


@router.post(
    "/prefetch",
    response_model=PrefetchAnswer,
    openapi_extra=json_body(PrefetchBody),
    responses=documented(errors.RequestError, errors.NodeUnavailable),
)
async def prefetch(request: Request) -> Response:
    """Check and mount many images; what became of each is said for each."""
    runtime: Runtime = request.app.state.runtime
    body = await parse(PrefetchBody, request)
    gate = asyncio.Semaphore(PREFETCH_AT_ONCE)

    async def one(name: str) -> dict[str, Any]:
        try:
            async with gate:
                _, mount = await runtime.images.acquire(name)
        except SandboxdError as error:
            return {"name": name, "mounted": False, "failure": failure_answer(error)}
        runtime.images.release(mount)
        return {"name": name, "mounted": True, "failure": None}

    return JsonAnswer({"images": await asyncio.gather(*map(one, body.images))})


@router.delete(
    "/{name:path}",
    status_code=204,
    responses=documented(errors.RequestError, errors.ImageInUse, errors.NodeUnavailable),
)
async def evict(
    request: Request,
    name: Annotated[str, Path(max_length=NAME_MAX, pattern=f"^{NAME_PATTERN}$")],
) -> Response:
    """Unmount an image that has no sandbox; its file stays in the store. One that is not mounted is
    evicted already."""
    runtime: Runtime = request.app.state.runtime
    await runtime.images.evict(name)
    return Response(status_code=204)
