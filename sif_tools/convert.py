"""Turn an image into a SIF: the source resolved, its layers merged, packed and published.

Needs no root and unpacks nothing: the merged tree is a stream into the squashfs writer. The same
image gives the same bytes: nothing of this host, of the clock or of the source's path goes in.
Not for deciding whether an image has to be converted at all, nor for keeping many of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from sif_tools.errors import DestinationExists, WriteFailed
from sif_tools.image_objects import SOURCE_DIGEST_LABEL, sif_objects, source_labels
from sif_tools.merge.merger import Merger
from sif_tools.progress import ProgressCallback, Stage, StageClock
from sif_tools.singularity_d import SingularityLayer
from sif_tools.sources.open import open_source
from sif_tools.sources.source import Source, SourceOptions
from sif_tools.squashfs import SquashfsOptions, find_tool, squashfs_from_tar
from sif_tools.tarstream.writer import TarWriter
from sif_tools.writer import FileContent, write_sif

__all__ = ["SOURCE_DIGEST_LABEL", "ConvertOptions", "ConvertResult", "convert", "open_source"]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """`architecture` is Go's name, perhaps with a variant (`arm/v7`); None is this host's."""

    squashfs: SquashfsOptions = field(default_factory=SquashfsOptions)
    architecture: str | None = None
    force: bool = False
    source: SourceOptions = field(default_factory=SourceOptions)


@dataclass(frozen=True, slots=True)
class ConvertResult:
    path: Path
    architecture: str
    manifest_digest: str | None
    size_bytes: int
    squashfs_bytes: int
    uncompressed_bytes: int
    inodes: int
    seconds: dict[str, float]


def convert(
    reference: str,
    destination: str | Path,
    options: ConvertOptions | None = None,
    progress: ProgressCallback | None = None,
) -> ConvertResult:
    """Convert a source to a SIF file. Raises SifError; nothing is left behind then."""
    options = options or ConvertOptions()
    path = Path(destination)
    clock = StageClock(progress)
    _check_before(path, options)
    with ExitStack() as stack:
        with clock.stage(Stage.RESOLVE, None):
            source = open_source(reference, options.architecture, options.source)
            stack.enter_context(source)
        labels = source_labels(source)
        merger = Merger(options.source.limits)
        with clock.stage(Stage.INDEX, _total(source)) as tell:
            done = 0
            for layer in source.layers:
                merger.index(layer, _after(done, tell))
                done += layer.size_bytes
            merger.index(
                SingularityLayer(
                    merger.tree, source.config, labels, config_decides=source.has_config
                )
            )
        written = _Written()
        with clock.stage(Stage.PACK, _total(source)) as tell:
            starts = _starts(source)

            def emit(writer: TarWriter) -> int:
                written.inodes = merger.emit(
                    writer, lambda number, count: tell(starts[number] + count)
                )
                written.stream_bytes = writer.total_bytes
                return written.inodes

            image, size = stack.enter_context(squashfs_from_tar(emit, options.squashfs))
        with clock.stage(Stage.PUBLISH, size) as tell:
            content = FileContent(image.fileno(), 0, size)
            objects = sif_objects(source, labels, content)
            total = write_sif(path, objects, force=options.force, progress=tell)
    return ConvertResult(
        path=path,
        architecture=source.architecture,
        manifest_digest=source.manifest_digest,
        size_bytes=total,
        squashfs_bytes=size,
        uncompressed_bytes=written.stream_bytes,
        inodes=written.inodes,
        seconds={stage.value: seconds for stage, seconds in clock.seconds.items()},
    )


@dataclass(slots=True)
class _Written:
    inodes: int = 0
    stream_bytes: int = 0


def _check_before(path: Path, options: ConvertOptions) -> None:
    """What would fail in the end anyway fails before the work."""
    find_tool()
    options.squashfs.check()
    try:
        os.stat(path.parent)
    except OSError as error:
        raise WriteFailed(f"{path.parent}: {error.strerror}") from error
    if not options.force and os.path.lexists(path):
        raise DestinationExists(f"{path} exists", hint="--force replaces it")


def _total(source: Source) -> int | None:
    return sum(layer.size_bytes for layer in source.layers) or None


def _after(done: int, tell: Callable[[int], None]) -> Callable[[int], None]:
    """Bytes of one layer told as bytes of all, `done` of which belong to the layers before."""
    return lambda count: tell(done + count)


def _starts(source: Source) -> list[int]:
    """Bytes of all layers below each, and below the generated one on top."""
    starts = [0]
    for layer in source.layers:
        starts.append(starts[-1] + layer.size_bytes)
    return starts
