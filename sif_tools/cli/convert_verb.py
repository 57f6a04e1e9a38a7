"""`sif-tools convert SOURCE DEST.sif`, and into a store: `convert SOURCE --store DIR`,
`convert --batch LIST --store DIR`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
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
from sif_tools.cli.store_convert import convert_batch, convert_to_store
from sif_tools.convert import ConvertOptions, ConvertResult, convert
from sif_tools.limits import DEFAULT_LIMITS
from sif_tools.progress import ProgressCallback, Stage
from sif_tools.sources.open import FORMS
from sif_tools.sources.source import SourceOptions
from sif_tools.squashfs import Compression, SquashfsOptions
from sif_tools.store.records import Layers

_WORDS: Final = {
    Stage.RESOLVE: "reading the image's description",
    Stage.INDEX: "indexing layers",
    Stage.PACK: "packing squashfs",
    Stage.PUBLISH: "writing the SIF",
}


def register(app: typer.Typer) -> None:
    app.command("convert")(convert_command)


def convert_command(
    source: Annotated[str | None, typer.Argument(help="one of: " + ", ".join(FORMS))] = None,
    destination: Annotated[
        Path | None, typer.Argument(metavar="[DEST.sif]", help="the SIF to make")
    ] = None,
    *,
    compression: Annotated[
        Compression,
        typer.Option(help="gzip for old readers, lz4 the fastest to read, xz the smallest"),
    ] = Compression.ZSTD,
    level: Annotated[
        int | None, typer.Option(help="[default: 3 for zstd, 9 for gzip, 1 for lz4, 6 for xz]")
    ] = None,
    block_size: Annotated[
        int, typer.Option(metavar="KIB", help="squashfs block size, 4 to 1024")
    ] = 128,
    for_readers: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="compressions all readers know [default: try here]"),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="architecture (amd64, arm64, arm/v7 …) [default: this host's]"),
    ] = None,
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="speak to registries without TLS")
    ] = False,
    auth_file: Annotated[
        Path | None, typer.Option(help="registry credentials [default: the usual places]")
    ] = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option(metavar="REGISTRY=HOST[/PREFIX]", help="asked before REGISTRY (repeatable)"),
    ] = None,
    max_layer_gib: Annotated[
        int, typer.Option(metavar="GIB", help="refuse layers that inflate to more")
    ] = DEFAULT_LIMITS.layer_bytes >> 30,
    max_ratio: Annotated[
        int, typer.Option(metavar="N", help="refuse layers that inflate to more than N times")
    ] = DEFAULT_LIMITS.ratio,
    force: Annotated[bool, typer.Option("--force", help="replace an existing DEST.sif")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    store: Annotated[
        Path | None, typer.Option(help="a store on shared scratch, instead of DEST.sif")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="what the store finds it by [default: SOURCE's own]")
    ] = None,
    layers: Annotated[
        Layers, typer.Option(help="in a store: bases shared by images, or one file each")
    ] = Layers.SHARED,
    batch: Annotated[
        Path | None, typer.Option(help="a list, SOURCE [NAME] a line, instead of SOURCE")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes for a batch")] = 2,
    journal: Annotated[
        Path | None, typer.Option(help="to resume a batch from [default: LIST.journal]")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="write a batch's report there")] = None,
) -> None:
    """Convert images to SIF files. Needs no root; the same image gives the same bytes."""
    options = ConvertOptions(
        squashfs=SquashfsOptions(
            compression=compression,
            level=level,
            block_size_bytes=block_size << 10,
            readers=None if for_readers is None else frozenset(for_readers.split(",")),
        ),
        architecture=arch,
        force=force,
        source=SourceOptions(
            plain_http=plain_http,
            auth_file=auth_file,
            mirrors=_mirrors(mirror or []),
            limits=replace(DEFAULT_LIMITS, layer_bytes=max_layer_gib << 30, ratio=max_ratio),
        ),
    )
    if batch is not None:
        if source is not None or store is None or name is not None:
            raise typer.BadParameter("--batch LIST goes with --store, without SOURCE and --name")
        if not convert_batch(
            batch,
            store,
            layers,
            options,
            workers=jobs,
            journal_path=journal,
            report_path=report,
            as_json=as_json,
        ):
            raise typer.Exit(1)
        return
    if source is None or (store is None) == (destination is None):
        raise typer.BadParameter("give SOURCE and either DEST.sif or --store")
    if destination is None:
        assert store is not None
        convert_to_store(source, store, name, layers, options, as_json=as_json)
        return
    with _shown_progress() as callback:
        result = convert(source, destination, options, callback)
    if as_json:
        print_json(asdict(result) | {"path": str(result.path)})
    else:
        _print_result(result)


def _mirrors(given: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in given:
        registry, equals, place = one.partition("=")
        if not (registry and equals and place):
            raise typer.BadParameter(f"{one!r} is not REGISTRY=HOST[/PREFIX]")
        found.setdefault(registry, []).append(place)
    return found


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
