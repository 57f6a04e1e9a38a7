"""`sif-tools sync-check DIR`: can a store be used from here?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sif_tools.cli.output import print_json
from sif_tools.errors import WriteFailed
from sif_tools.store.sync_check import sync_check


def register(app: typer.Typer) -> None:
    app.command("sync-check")(sync_check_command)


def sync_check_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a store, or its place to be")],
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Try all that a store needs of its file system, on this host; exit status 1 if some fails."""
    try:
        checks = sync_check(directory)
    except OSError as error:
        raise WriteFailed(f"{directory}: {error.strerror}") from error
    usable = all(one.holds for one in checks if one.needed)
    if as_json:
        print_json({"usable": usable, "checks": [asdict(one) for one in checks]})
    else:
        for one in checks:
            word = "ok" if one.holds else "NO" if one.needed else "no"
            print(f"{word:<3} {one.name:<20} {one.detail}")
        print("usable" if usable else "not usable from here")
    if not usable:
        raise typer.Exit(1)
