"""``sandboxd rm`` and ``prune``: delete sandboxes, by id, by run or label, or what nobody needs."""

from __future__ import annotations

from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import sandbox_ids
from sandboxd.cli.output import EXIT_FAILED, complain, reporting, say
from sandboxd.client.results import Deleted
from sandboxd.client.sync import Client
from sandboxd.errors import SandboxdError
from sandboxd.model import SandboxState


def rm(
    sandboxes: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="Of the sandboxes.", autocompletion=sandbox_ids),
    ] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Delete every sandbox of the node.")] = False,
    run: options.RunName = None,
    label: options.Label = None,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Delete sandboxes, and print the IDs of those that are gone."""
    many = run is not None or bool(label)
    if bool(sandboxes) + all_ + many != 1:
        raise typer.BadParameter("give IDs, or --run and --label, or --all")
    with reporting(), options.daemon(url, token_file, config) as daemon:
        if many:
            good = _told(daemon.delete_many(run=run, labels=options.labels(label)))
        else:
            # The whole list first: pages would shift under the deletions.
            ids = [info.id for info in list(daemon.list())] if all_ else sandboxes or []
            good = not [one for one in ids if not _delete(daemon, one)]
    if not good:
        raise typer.Exit(EXIT_FAILED)


def prune(
    *,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Delete the sandboxes that have failed, and unmount the images that have none."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        failed = list(daemon.list(state=SandboxState.FAILED))
        good = not [info for info in failed if not _delete(daemon, info.id)]
        for image in daemon.images():
            if image.mounted and not image.users:
                good &= _evict(daemon, image.name)
    if not good:
        raise typer.Exit(EXIT_FAILED)


def _delete(daemon: Client, sandbox: str) -> bool:
    try:
        daemon.delete(sandbox)
    except SandboxdError as error:
        complain(error)
        return False
    typer.echo(sandbox)
    return True


def _evict(daemon: Client, image: str) -> bool:
    try:
        daemon.evict_image(image)
    except SandboxdError as error:
        complain(error)
        return False
    typer.echo(image)
    return True


def _told(result: Deleted) -> bool:
    for sandbox in result.deleted:
        typer.echo(sandbox)
    for sandbox in result.pending:
        say(f"{sandbox}: not done yet; it goes on by itself")
    for error in result.failed.values():
        complain(error)
    return not result.pending and not result.failed
