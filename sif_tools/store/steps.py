"""The steps of keeping an image, in order. For tests that end a converter at each of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Step(StrEnum):
    CLAIMED = "claimed"
    BUILT = "built"
    COPY_BEGUN = "copy-begun"
    COPIED = "copied"
    SYNCED = "synced"
    VERIFIED = "verified"
    LINKED = "linked"
    PUBLISHED = "published"
    RECORDED = "recorded"
    NAMED = "named"
    RELEASED = "released"


OnStep = Callable[[Step], None]


def ignore(step: Step) -> None:
    """What a step means to whoever does not test."""
    del step
