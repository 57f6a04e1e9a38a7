"""JSON bodies: parsed by pydantic straight from the bytes, and put into the OpenAPI document.

Not left to FastAPI, which goes through Python's json first: that takes NaN and lone surrogates, and
the round through Python objects costs as much as a small command does.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError

from sandboxd.api.exception_handlers import validation_error
from sandboxd.api.schemas import Body

SCHEMA_REFERENCE = "#/components/schemas/{model}"

SomeBody = TypeVar("SomeBody", bound=Body)


async def parse(model: type[SomeBody], request: Request) -> SomeBody:
    """The request's body. Raises RequestError saying what is wrong with it, and where."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise validation_error(
            [{**one, "loc": ("body", *one["loc"])} for one in problems]
        ) from error


def json_body(model: type[Body]) -> dict[str, Any]:
    """``openapi_extra`` of a route that parses this body."""
    schema = model.model_json_schema(ref_template=SCHEMA_REFERENCE)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def lift_definitions(document: dict[str, Any], operation: dict[str, Any]) -> None:
    """Move what ``json_body`` refers to where OpenAPI looks for it."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    definitions = content.get("schema", {}).pop("$defs", {})
    document["components"]["schemas"] |= definitions
