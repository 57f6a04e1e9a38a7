"""`sif-tools flatten`: one self-contained SIF of a base and what lies on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sif_tools.cli.output import human_bytes, print_json
from sif_tools.squashfs import Compression, SquashfsOptions
from sif_tools.store.flatten import flatten
from sif_tools.store.layout import open_store
from sif_tools.store.lookup import find_image


def register(app: typer.Typer) -> None:
    app.command("flatten")(flatten_command)


def flatten_command(
    what: Annotated[
        list[str], typer.Argument(metavar="NAME | BASE.sif DELTA.sif…", help="base first")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DEST.sif")],
    *,
    store: Annotated[Path | None, typer.Option(help="NAME is an image of this store")] = None,
    compression: Annotated[Compression, typer.Option()] = Compression.ZSTD,
    level: Annotated[int | None, typer.Option()] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing DEST.sif")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Make one SIF of an image that a store keeps as several."""
    if store is None:
        sifs = [Path(one) for one in what]
    elif len(what) == 1:
        sifs = [one.path for one in find_image(open_store(store), what[0])[1]]
    else:
        raise typer.BadParameter("with --store, give one NAME")
    options = SquashfsOptions(compression=compression, level=level)
    size = flatten(sifs, output, options, force=force)
    if as_json:
        print_json({"path": str(output), "size_bytes": size, "of": [str(one) for one in sifs]})
    else:
        print(f"{output}: {human_bytes(size)}, of {len(sifs)} SIFs")
