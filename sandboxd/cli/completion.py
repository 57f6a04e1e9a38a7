"""What the shell offers when a word is to be completed: ids of living sandboxes, names of images.

A daemon that does not answer at once offers nothing; nobody wants an error in the middle of a line.
"""

from __future__ import annotations

from collections.abc import Callable

from sandboxd.client.sync import Client
from sandboxd.errors import SandboxdError


def sandbox_ids(incomplete: str) -> list[str]:
    return [one for one in _ask(_ids) if one.startswith(incomplete)]


def image_names(incomplete: str) -> list[str]:
    return [one for one in _ask(_images) if one.startswith(incomplete)]


def _ids(client: Client) -> list[str]:
    return [info.id for info in client.list()]


def _images(client: Client) -> list[str]:
    return [image.name for image in client.images()]


def _ask(what: Callable[[Client], list[str]]) -> list[str]:
    try:
        with Client(retry_s=0.0) as client:
            return what(client)
    except SandboxdError:
        return []
