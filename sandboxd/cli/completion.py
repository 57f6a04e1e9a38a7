"""What the shell offers when a word is to be completed: ids of sandboxes, their processes and
snapshots, names of images.

A daemon that does not answer at once offers nothing; nobody wants an error in the middle of a line.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from sandboxd.client import process_calls
from sandboxd.client.sync import Client
from sandboxd.errors import SandboxdError


def sandbox_ids(incomplete: str) -> list[str]:
    return [one for one in _ask(_ids) if one.startswith(incomplete)]


def image_names(incomplete: str) -> list[str]:
    return [one for one in _ask(_images) if one.startswith(incomplete)]


def snapshot_ids(incomplete: str) -> list[str]:
    return [one for one in _ask(_snapshots) if one.startswith(incomplete)]


def process_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of the sandbox that stands before it."""
    sandbox = ctx.params.get("sandbox")
    if not isinstance(sandbox, str):
        return []

    def processes(client: Client) -> list[str]:
        return [one.id for one in client.do(process_calls.list_all(sandbox))]

    return [one for one in _ask(processes) if one.startswith(incomplete)]


def _ids(client: Client) -> list[str]:
    return [info.id for info in client.list()]


def _images(client: Client) -> list[str]:
    return [image.name for image in client.images()]


def _snapshots(client: Client) -> list[str]:
    return [one.id for one in client.snapshots()]


def _ask(what: Callable[[Client], list[str]]) -> list[str]:
    try:
        with Client(retry_s=0.0) as client:
            return what(client)
    except SandboxdError:
        return []
