"""``sandboxd inspect``: all that is known of a sandbox."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import sandbox_ids
from sandboxd.cli.output import print_json, reporting
from sandboxd.client.sync import Client
from sandboxd.errors import SandboxdError


def inspect(
    sandboxes: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Of the sandboxes.", autocompletion=sandbox_ids),
    ],
    *,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Print all that is known of sandboxes, always as JSON: themselves, their use, their events."""
    del as_json  # so that a program can give it to every verb
    with reporting(), options.daemon(url, token_file, config) as daemon:
        print_json([_all(daemon, one) for one in sandboxes])


def _all(daemon: Client, sandbox_id: str) -> dict[str, object]:
    sandbox = daemon.connect(sandbox_id)
    known: dict[str, object] = {"sandbox": sandbox.info, "events": sandbox.events()}
    with contextlib.suppress(SandboxdError):  # one that has failed may have no cgroups any more
        known["stats"] = sandbox.stats()
    return known
