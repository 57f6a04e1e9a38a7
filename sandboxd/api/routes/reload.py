"""Reading the configuration again."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from sandboxd import errors
from sandboxd.api.answers import JsonAnswer
from sandboxd.api.exception_handlers import documented
from sandboxd.api.schemas.reload import ReloadAnswer
from sandboxd.runtime.reloading import Reloader

router = APIRouter(prefix="/v1/node", tags=["node"])


@router.post("/reload", response_model=ReloadAnswer, responses=documented(errors.ConfigError))
async def reload(request: Request) -> Response:
    """Read the configuration's file again and take over what can be. Where something in it is
    wrong (`config-invalid`, with the line), everything stays as it was."""
    reloader: Reloader = request.app.state.reloader
    config = await asyncio.to_thread(reloader.read)
    done = reloader.take_over(config)
    return JsonAnswer(
        {
            "changed": [asdict(one) for one in done.changed],
            "needs_restart": [asdict(one) for one in done.needs_restart],
        }
    )
