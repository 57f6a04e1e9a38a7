"""``sandboxd snapshots``: keep a sandbox's files as they are, list what is kept, let go of it.

``reset --to`` goes back to one, ``run SNAPSHOT`` begins a new sandbox as one.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import snapshot_ids
from sandboxd.cli.output import (
    EXIT_FAILED,
    age,
    complain,
    failures_json,
    mebibytes,
    print_json,
    print_table,
    reporting,
)
from sandboxd.errors import SandboxdError


def build() -> typer.Typer:
    """The group of verbs."""
    group = typer.Typer(no_args_is_help=True, help="Snapshots of sandboxes.")
    group.command("ls")(ls)
    group.command("take")(take)
    group.command("export")(export)
    group.command("rm")(rm)
    return group


def ls(
    *,
    run: options.RunName = None,
    sandbox: Annotated[
        str | None, typer.Option(metavar="ID", help="Taken of this sandbox only.")
    ] = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """List the snapshots."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        found = daemon.snapshots(run=run, sandbox=sandbox)
    if as_json:
        print_json({"snapshots": found})
        return
    now = datetime.datetime.now(datetime.UTC)
    rows = [
        [
            one.id,
            age(one.created_at, now),
            mebibytes(one.bytes),
            one.run or "-",
            one.name or "-",
            one.sandbox,
            one.image,
        ]
        for one in found
    ]
    print_table(["ID", "AGE", "SIZE", "RUN", "NAME", "SANDBOX", "IMAGE"], rows)


def take(
    sandbox: options.SandboxId,
    *,
    name: Annotated[str, typer.Option(help="For people.")] = "",
    on_running: Annotated[
        Literal["fail", "kill", "copy"],
        typer.Option(help="With live processes: refuse, kill them, or copy what was written."),
    ] = "fail",
    ttl: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="Then it is deleted.")
    ] = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Keep a sandbox's files as they are now, and print the snapshot's ID."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        taken = daemon.connect(sandbox).snapshot(name, on_running=on_running, ttl_s=ttl)
    print_json(taken) if as_json else typer.echo(taken.id)


def export(
    snapshot: Annotated[
        str, typer.Argument(metavar="ID", help="Of the snapshot.", autocompletion=snapshot_ids)
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The SIF to write.")],
    *,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Write a snapshot as a delta SIF, for a node that has its image.

    `sif-tools flatten IMAGE.sif FILE -o OUT.sif` makes one image of the two."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        try:
            size = daemon.export_snapshot(snapshot, file)
        except OSError as error:
            raise typer.BadParameter(str(error)) from None
    print_json({"file": str(file), "size_bytes": size}) if as_json else typer.echo(str(file))


def rm(
    snapshots: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Of the snapshots.", autocompletion=snapshot_ids),
    ],
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Let go of snapshots. Sandboxes that stand on them live on."""
    deleted: list[str] = []
    failed: dict[str, SandboxdError] = {}
    with reporting(), options.daemon(url, token_file, config) as daemon:
        for one in snapshots:
            try:
                daemon.delete_snapshot(one)
                deleted.append(one)
            except SandboxdError as error:
                failed[one] = error
    if as_json:
        print_json({"deleted": deleted, "failed": failures_json(failed)})
    else:
        for one in deleted:
            typer.echo(one)
        for why in failed.values():
            complain(why)
    if failed:
        raise typer.Exit(EXIT_FAILED)
