"""``sandboxd sweep``: remove what a crash has left of this instance, or only tell."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import EXIT_FAILED, reporting, say
from sandboxd.config import load_config
from sandboxd.errors import FeatureMissing


def sweep(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell, and remove nothing.")] = False,
    config: options.ConfigFile = None,
    runtime_dir: Annotated[str | None, typer.Option(help="Whose leftovers.")] = None,
    state_dir: Annotated[str | None, typer.Option(help="The same, of files.")] = None,
) -> None:
    """Remove what this instance has left behind and no node owns: cgroups, processes, mounts,
    network rules, files. A node does so by itself when it starts, and every minute; here, with it
    or without."""
    # Here and not above: no other verb needs the kernel layer.
    from sandboxd.host import sweep as host  # noqa: PLC0415

    with reporting():
        if os.geteuid() != 0:
            raise FeatureMissing("sweeping needs root: cgroups and mounts are the node's")
        settings = load_config(
            config, overrides={"runtime_dir": runtime_dir, "state_dir": state_dir}
        )
        with host.instance(settings) as instance:
            if dry_run:
                for leftover in host.find(instance):
                    typer.echo(str(leftover))
                return
            done = host.sweep(instance)
    for leftover, failure in done:
        typer.echo(str(leftover))
        if failure is not None:
            say(f"{leftover}: {failure}")
    if any(failure is not None for _, failure in done):
        raise typer.Exit(EXIT_FAILED)
