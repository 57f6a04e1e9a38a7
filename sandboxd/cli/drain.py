"""``sandboxd drain`` and ``undrain``: empty a node before it is stopped, or take it up again."""

from __future__ import annotations

from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import print_json, reporting
from sandboxd.client.run_calls import DrainInfo


def drain(
    *,
    deadline: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Delete all that is still there by then."),
    ] = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Take no more sandboxes on; those that are there go on."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        _tell(daemon.drain(deadline), as_json)


def undrain(
    *,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Take sandboxes on again."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        _tell(daemon.undrain(), as_json)


def _tell(info: DrainInfo, as_json: bool) -> None:
    if as_json:
        print_json(info)
    elif not info.draining:
        typer.echo("not draining")
    else:
        until = "" if info.deadline is None else f", to be deleted at {info.deadline.isoformat()}"
        typer.echo(f"draining: {info.sandboxes} sandboxes are there{until}")
