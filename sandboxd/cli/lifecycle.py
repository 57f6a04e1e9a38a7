"""``sandboxd pause``, ``resume`` and ``renew``."""

from __future__ import annotations

from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import reporting


def pause(
    sandbox: options.SandboxId,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Freeze every process of a sandbox."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        typer.echo(daemon.connect(sandbox).pause().state)


def resume(
    sandbox: options.SandboxId,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Let the processes of a paused sandbox go on."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        typer.echo(daemon.connect(sandbox).resume().state)


def renew(
    sandbox: options.SandboxId,
    *,
    ttl: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="From now on; its own if left out."),
    ] = None,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Let a sandbox live on, and print until when."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        typer.echo(daemon.connect(sandbox).renew(ttl).expires_at.isoformat())
