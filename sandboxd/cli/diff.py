"""``sandboxd diff``: what changed in a sandbox or a snapshot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import snapshot_ids
from sandboxd.cli.output import print_json, reporting
from sandboxd.cli.run import SNAPSHOT
from sandboxd.client.diff_calls import Diff, DiffEntry
from sandboxd.client.sync import Client

_SIGNS: Final = {"added": "A", "changed": "C", "removed": "D"}


def diff(
    what: Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a snapshot (sn-…).")],
    *,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="SNAPSHOT",
            help="What changed since this snapshot, instead of since the image.",
            autocompletion=snapshot_ids,
        ),
    ] = None,
    tar: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a tar instead: an OCI layer of the changes."),
    ] = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Say what was added (A), changed (C; and what of it) and removed (D)."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        if tar is not None:
            try:
                size = _download(daemon, what, tar, since)
            except OSError as error:
                raise typer.BadParameter(str(error)) from None
            print_json({"file": str(tar), "size_bytes": size}) if as_json else None
            return
        changes: list[DiffEntry] = []
        after: str | None = None
        while True:
            page = _page(daemon, what, since, after)
            changes += page.changes
            after = page.next
            if after is None:
                break
            if not as_json:
                _print(changes)
                changes.clear()
    if as_json:
        print_json({"changes": changes})
    else:
        _print(changes)


def _page(daemon: Client, what: str, since: str | None, after: str | None) -> Diff:
    if what.startswith(SNAPSHOT):
        return daemon.snapshot_diff(what, since=since, after=after)
    return daemon.connect(what).diff(since=since, after=after)


def _download(daemon: Client, what: str, target: Path, since: str | None) -> int:
    if what.startswith(SNAPSHOT):
        return daemon.download_snapshot_diff(what, target, since=since)
    return daemon.connect(what).download_diff(target, since=since)


def _print(changes: list[DiffEntry]) -> None:
    for one in changes:
        # A name may hold a line's end, or what a terminal obeys.
        name = one.path if one.path.isprintable() else repr(os.fsencode(one.path))[2:-1]
        what = f"  ({', '.join(one.what)})" if one.what else ""
        typer.echo(f"{_SIGNS[one.change]} {name}{what}")
