"""``sandboxd rm``: delete sandboxes."""

from __future__ import annotations

from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.http import DaemonError
from sandboxd.cli.output import EXIT_FAILED, complain, reporting


def rm(
    sandboxes: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Of the sandboxes.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Delete every sandbox of the node.")] = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Delete sandboxes, and print the IDs of those that are gone."""
    if bool(sandboxes) == all_:
        raise typer.BadParameter("give either IDs or --all")
    failed = False
    with reporting(), options.daemon(url, token_file, config) as daemon:
        # The whole list first: pages would shift under the deletions.
        ids = [str(row["id"]) for row in list(daemon.sandboxes())] if all_ else sandboxes or []
        for sandbox in ids:  # all of them, whatever becomes of one
            try:
                daemon.delete(sandbox)
            except DaemonError as error:
                complain(error)
                failed = True
            else:
                typer.echo(sandbox)
    if failed:
        raise typer.Exit(EXIT_FAILED)
