"""JSON bodies: parsed by pydantic straight from the bytes, and put into the OpenAPI document.

Not left to FastAPI, which goes through Python's json first: that takes NaN and lone surrogates, and
the round through Python objects costs as much as a small command does.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from sandboxd.api.exception_handlers import validation_error
from sandboxd.api.schemas.base import Body

SCHEMA_REFERENCE = "#/components/schemas/{model}"

SomeBody = TypeVar("SomeBody", bound=Body)


async def parse(
    model: type[SomeBody], request: Request, default: SomeBody | None = None
) -> SomeBody:
    """The request's body, or ``default`` where there is none. Raises RequestError saying what is
    wrong with it, and where."""
    body = await _read(request)
    if not body and default is not None:
        return default
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise validation_error(
            [{**one, "loc": ("body", *one["loc"])} for one in problems]
        ) from error


async def _read(request: Request) -> bytes:
    """The whole body. Not ``Request.body``, whose generators cost more than the one message that
    most bodies are. Raises ClientDisconnect."""
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def json_body(model: type[Body], *, required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route that parses this body."""
    schema = model.model_json_schema(ref_template=SCHEMA_REFERENCE)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


def lift_definitions(document: dict[str, Any], operation: dict[str, Any]) -> None:
    """Move what ``json_body`` refers to where OpenAPI looks for it."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    definitions = content.get("schema", {}).pop("$defs", {})
    document["components"]["schemas"] |= definitions
