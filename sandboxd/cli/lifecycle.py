"""``sandboxd pause``, ``resume``, ``renew`` and ``reset``."""

from __future__ import annotations

from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import snapshot_ids
from sandboxd.cli.output import print_json, reporting


def pause(
    sandbox: options.SandboxId,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Freeze every process of a sandbox."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        info = daemon.connect(sandbox).pause()
    print_json(info) if as_json else typer.echo(info.state)


def resume(
    sandbox: options.SandboxId,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Let the processes of a paused sandbox go on."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        info = daemon.connect(sandbox).resume()
    print_json(info) if as_json else typer.echo(info.state)


def renew(
    sandbox: options.SandboxId,
    *,
    ttl: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="From now on; its own if left out."),
    ] = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Let a sandbox live on, and print until when."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        info = daemon.connect(sandbox).renew(ttl)
    print_json(info) if as_json else typer.echo(info.expires_at.isoformat())


def reset(
    sandbox: options.SandboxId,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="SNAPSHOT",
            help="Begin from this snapshot instead of the image.",
            autocompletion=snapshot_ids,
        ),
    ] = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Kill all processes of a sandbox and put its files back, to the image or to a snapshot."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        box = daemon.connect(sandbox)
        info = box.reset() if to is None else box.rollback(to)
    print_json(info) if as_json else typer.echo(info.id)
