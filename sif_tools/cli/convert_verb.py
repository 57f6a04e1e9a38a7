"""`sif-tools convert SOURCE DEST.sif`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from sif_tools.cli.output import human_bytes, print_json
from sif_tools.convert import ConvertOptions, ConvertResult, convert
from sif_tools.progress import ProgressCallback, Stage
from sif_tools.squashfs import Compression, SquashfsOptions

_WORDS: Final = {
    Stage.RESOLVE: "reading the image's description",
    Stage.INDEX: "indexing layers",
    Stage.PACK: "packing squashfs",
    Stage.PUBLISH: "writing the SIF",
}


def register(app: typer.Typer) -> None:
    app.command("convert")(convert_command)


def convert_command(
    source: Annotated[str, typer.Argument(help="oci:DIR[:TAG] or rootfs:DIR")],
    destination: Annotated[Path, typer.Argument(metavar="DEST.sif", help="the SIF to make")],
    *,
    compression: Annotated[
        Compression, typer.Option(help="zstd, or gzip for old readers")
    ] = Compression.ZSTD,
    level: Annotated[
        int | None, typer.Option(help="compression level [default: 3 for zstd, 9 for gzip]")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="architecture (amd64, arm64, arm/v7 …) [default: this host's]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing DEST.sif")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Convert an image to a SIF file. Needs no root; the same image gives the same bytes."""
    options = ConvertOptions(
        squashfs=SquashfsOptions(compression=compression, level=level),
        architecture=arch,
        force=force,
    )
    with _shown_progress() as callback:
        result = convert(source, destination, options, callback)
    if as_json:
        print_json(asdict(result) | {"path": str(result.path)})
    else:
        _print_result(result)


def _print_result(result: ConvertResult) -> None:
    seconds = sum(result.seconds.values())
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in result.seconds.items())
    print(
        f"{result.path}: {human_bytes(result.size_bytes)}, {result.inodes} inodes, "
        f"{result.architecture}, from {human_bytes(result.uncompressed_bytes)}"
    )
    if result.manifest_digest:
        print(f"image {result.manifest_digest}")
    print(f"{seconds:.1f} s ({stages})")


@contextmanager
def _shown_progress() -> Iterator[ProgressCallback]:
    """A bar on a terminal; elsewhere one line a stage. Always stderr: stdout is the result's."""
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description:<32}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            yield _Bars(bars)
    else:
        yield _Lines()


class _Bars:
    """A bar for each stage that has bytes to count; those before the current one are full."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[Stage, TaskID] = {}

    def __call__(self, stage: Stage, done_bytes: int, total_bytes: int | None) -> None:
        if stage is Stage.RESOLVE:
            return
        if stage not in self._tasks:
            for task in self._bars.tasks:
                self._bars.update(task.id, total=task.completed)
            self._tasks[stage] = self._bars.add_task(_WORDS[stage], total=total_bytes)
        self._bars.update(self._tasks[stage], completed=done_bytes, total=total_bytes)


class _Lines:
    def __init__(self) -> None:
        self._told: set[Stage] = set()

    def __call__(self, stage: Stage, done_bytes: int, total_bytes: int | None) -> None:
        del done_bytes
        if stage not in self._told:
            self._told.add(stage)
            size = "" if total_bytes is None else f" ({human_bytes(total_bytes)})"
            print(f"{_WORDS[stage]}{size}", file=sys.stderr)
