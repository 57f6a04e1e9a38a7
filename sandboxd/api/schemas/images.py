"""Images that are here or shall be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sandboxd.api.schemas.base import Answer, Body, ImageName


class ImageBody(Body):
    image: ImageName = Field(examples=["debian-python"])


class ImageAnswer(Answer):
    name: str
    size_bytes: int | None
    modified_at: str | None
    mounted: bool
    users: int
    """Sandboxes that have it as their root."""
    local: bool
    """All of it is copied to this node's disk, as far as that is known: of one that nobody has
    asked this daemon for it is not."""


class ImageList(Answer):
    images: list[ImageAnswer]
    truncated: bool
    """There are more than are listed here."""


class PreparedImageAnswer(Answer):
    name: str
    key: str
    size_bytes: int
    mounted: Literal[True]
    user: str
    workdir: str
    labels: dict[str, str]
