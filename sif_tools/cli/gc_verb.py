"""`sif-tools gc STORE`: what no name leads to goes to the trash, and in time for good."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from sif_tools.cli.output import human_bytes, print_json
from sif_tools.store.collect import GRACE_S, Collected, collect
from sif_tools.store.layout import open_store

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def register(app: typer.Typer) -> None:
    app.command("gc")(gc_command)


def gc_command(
    store: Annotated[Path, typer.Argument(metavar="STORE")],
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="first drop this image's name (repeatable)"),
    ] = None,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="how long before each step: 90s, 12h, 7d")
    ] = f"{int(GRACE_S // 86400)}d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="change nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Remove what is unused: to the trash after the grace time, for good after as long there.

    What a node has leased is never touched.
    """
    layout = open_store(store)
    done = collect(
        layout, grace_s=_seconds(grace), dry_run=dry_run, drop_names=() if drop is None else drop
    )
    if as_json:
        print_json(asdict(done))
    else:
        _print(done, dry_run)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no time like 90s, 12h or 7d")
    return float(int(found[1]) * _UNITS[found[2]])


def _print(done: Collected, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    print(f"{done.names} names; {done.kept_objects} objects stay, {done.leased} leased")
    print(
        f"{len(done.trashed)} {would}put into the trash ({human_bytes(done.trashed_bytes)}), "
        f"{len(done.removed)} {would}removed from it ({human_bytes(done.removed_bytes)}), "
        f"{len(done.restored)} {would}taken out of it again"
    )
    if done.leftovers:
        print(f"{done.leftovers} leftovers of the killed {would}removed")
