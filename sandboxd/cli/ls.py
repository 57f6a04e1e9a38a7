"""``sandboxd ls`` and ``ps``: the sandboxes of a node."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import age, print_json, print_table, reporting
from sandboxd.client.results import SandboxInfo


def ls(
    *,
    run: options.RunName = None,
    label: options.Label = None,
    state: Annotated[str | None, typer.Option(help="In this state only.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the IDs alone.")] = False,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """List the sandboxes."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        found = list(daemon.list(run=run, labels=options.labels(label), state=state))
    if as_json:
        print_json({"sandboxes": found})
    elif quiet:
        for info in found:
            typer.echo(info.id)
    else:
        now = datetime.datetime.now(datetime.UTC)
        columns = ["ID", "STATE", "AGE", "RUN", "NAME", "IMAGE"]
        print_table(columns, [_row(info, now) for info in found])


def _row(info: SandboxInfo, now: datetime.datetime) -> list[str]:
    return [
        info.id,
        info.state,
        age(info.created_at, now),
        info.run or "-",
        info.name or "-",
        info.image,
    ]
