"""``sandboxd runs``: who has sandboxes on this node, and ending one with all it has."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import EXIT_FAILED, complain, print_json, print_table, reporting, say
from sandboxd.client.run_calls import RunEnd, RunInfo

Names = Annotated[list[str], typer.Argument(metavar="RUN...", help="Names.")]


def build() -> typer.Typer:
    """The group of verbs."""
    group = typer.Typer(no_args_is_help=True, help="The runs that own sandboxes.")
    group.command("ls")(ls)
    group.command("rm")(rm)
    return group


def ls(
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """List the runs, those that were ended lately too."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        found = list(daemon.runs())
    if as_json:
        print_json({"runs": found})
        return
    now = datetime.datetime.now(datetime.UTC)
    columns = ["RUN", "STATE", "SANDBOXES", "QUOTA", "WAITING", "LEASE"]
    print_table(columns, [_row(info, now) for info in found])


def rm(
    runs: Names,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """End everything of these runs, and print the IDs of the sandboxes that are gone."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        good = [_told(daemon.delete_run(name)) for name in runs]
    if not all(good):
        raise typer.Exit(EXIT_FAILED)


def _row(info: RunInfo, now: datetime.datetime) -> list[str]:
    left = "-"
    if info.expires_at is not None:
        left = f"{max(0.0, (info.expires_at - now).total_seconds()):.0f}s"
    return [
        info.name,
        info.state,
        str(info.sandboxes),
        str(info.max_sandboxes or "-"),
        str(info.waiting),
        left,
    ]


def _told(end: RunEnd) -> bool:
    for sandbox in end.deleted:
        typer.echo(sandbox)
    for sandbox in end.pending:
        say(f"{sandbox}: not done yet; it goes on by itself")
    for error in end.failed.values():
        complain(error)
    return not end.pending and not end.failed
