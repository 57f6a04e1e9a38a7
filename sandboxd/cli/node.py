"""``sandboxd node``: the node's root part as a unit of its own, beside daemons that come and go."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import reporting
from sandboxd.config import load_config
from sandboxd.errors import FeatureMissing
from sandboxd.host.command import hostd_command


def node(
    *,
    config: options.ConfigFile = None,
    runtime_dir: Annotated[str | None, typer.Option(help="Sockets, gone at reboot.")] = None,
    user: Annotated[str | None, typer.Option(help="Account that the API runs as.")] = None,
    max_sandboxes: Annotated[int | None, typer.Option(help="At once.")] = None,
) -> None:
    """Run the part of a node that needs root, in the foreground: sandboxes live as long as it does,
    and `serve` may be stopped and started beside it."""
    with reporting():
        settings = load_config(
            config,
            overrides={"runtime_dir": runtime_dir, "user": user, "max_sandboxes": max_sandboxes},
        )
        if os.geteuid() != 0:
            raise FeatureMissing(
                "a node as a unit of its own must be started as root",
                hint="sudo sandboxd node; or `sandboxd serve`, whose own node needs no root",
            )
    # In our place: what stays for weeks is not to hold the command line's libraries.
    command = hostd_command(settings)
    os.execv(command[0], command)
