"""``sandboxd serve``: run the daemon."""

from __future__ import annotations

from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import reporting
from sandboxd.config import load_config


def serve(
    *,
    config: options.ConfigFile = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the API.")] = (
        None
    ),
    state_dir: Annotated[str | None, typer.Option(help="What outlives the daemon.")] = None,
    runtime_dir: Annotated[str | None, typer.Option(help="Sockets, gone at reboot.")] = None,
    images_dir: Annotated[str | None, typer.Option(help="Where the images lie.")] = None,
    user: Annotated[str | None, typer.Option(help="Account that the API runs as.")] = None,
    max_sandboxes: Annotated[int | None, typer.Option(help="At once.")] = None,
    node: Annotated[str | None, typer.Option(help="Its root part: auto, own or unit.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
) -> None:
    """Run the daemon, in the foreground."""
    flags: dict[str, object] = {
        "listen": listen,
        "state_dir": state_dir,
        "runtime_dir": runtime_dir,
        "images_dir": images_dir,
        "user": user,
        "max_sandboxes": max_sandboxes,
        "log_level": log_level,
        "log_format": log_format,
        "node": node,
    }
    with reporting():
        # Here and not above: no other verb is to pay for the web stack.
        from sandboxd.serve import (  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
            run,
        )

        raise typer.Exit(run(lambda: load_config(config, overrides=flags)) or 0)
