"""A base and what lies on it, made one self-contained SIF again, without the image's source."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from sif_tools.errors import BadSource
from sif_tools.format import DataType, PartType
from sif_tools.image_objects import squashfs_object
from sif_tools.limits import DEFAULT_LIMITS, Limits
from sif_tools.merge.merger import Merger, Pass, Progress
from sif_tools.merge.names import WHITEOUT_PREFIX
from sif_tools.partition import overlay_partition, squashfs_partition
from sif_tools.reader import Sif, opened, read_object, read_sif
from sif_tools.sources.sif_file import SquashfsLayer, copy_partition
from sif_tools.squashfs import SquashfsOptions, squashfs_from_tar
from sif_tools.store.delta_object import DELTA_NAME, read_delta
from sif_tools.tarstream.entry import Entry, EntryStream, Kind, Piece
from sif_tools.writer import DataObject, FileContent, write_sif

_MAX_OBJECT_BYTES: Final = 16 << 20


def flatten(
    sifs: Sequence[Path],
    destination: Path,
    options: SquashfsOptions | None = None,
    *,
    force: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> int:
    """Write one SIF with what `sifs`, base first, show together; returns its size in bytes.

    What the image says about itself is taken from the uppermost. Raises SifError: BadSource where
    they do not belong together.
    """
    with ExitStack() as stack:
        fds = [stack.enter_context(opened(path)) for path in sifs]
        parsed = [read_sif(fd) for fd in fds]
        _check_order(parsed, fds, sifs)
        merger = Merger(limits)
        for number, (sif, fd) in enumerate(zip(parsed, fds, strict=True)):
            find = overlay_partition if number else squashfs_partition
            partition = find(sif, fd)
            squashfs = stack.enter_context(copy_partition(fd, partition))
            layer = SquashfsLayer(squashfs, limits)
            merger.index(_DeltaLayer(layer, sifs[number]) if number else layer)
            arch = partition.arch
        image, size = stack.enter_context(
            squashfs_from_tar(merger.emit, options or SquashfsOptions())
        )
        objects = [*objects_of_image(parsed[-1], fds[-1])]
        content = FileContent(image.fileno(), 0, size)
        objects.append(squashfs_object(content, PartType.PRIMARY_SYSTEM, arch))
        return write_sif(destination, objects, force=force)


def _check_order(parsed: Sequence[Sif], fds: Sequence[int], sifs: Sequence[Path]) -> None:
    if not parsed or parsed[0].primary is None:
        raise BadSource("the first is no base: it has no primary partition")
    for sif, fd, path in zip(parsed[1:], fds[1:], sifs[1:], strict=True):
        if sif.primary is not None:
            raise BadSource(f"{path} is no delta, but an image of its own")
        try:
            node = read_delta(sif, fd)
        except ValueError as error:
            raise BadSource(f"{path}: {error}") from error
        below = node.get("below")
        if sif is parsed[-1] and isinstance(below, list) and len(below) != len(parsed) - 1:
            raise BadSource(f"{path} belongs on {len(below)} SIFs: {', '.join(map(str, below))}")


def objects_of_image(sif: Sif, fd: int) -> Iterator[DataObject]:
    """Everything but the file system and what makes a delta one."""
    for one in sif.descriptors:
        if one.is_partition or one.name == DELTA_NAME or one.data_type == DataType.SIGNATURE:
            continue
        data = read_object(fd, one, limit_bytes=_MAX_OBJECT_BYTES)
        yield DataObject(DataType(one.data_type), data, name=one.name)


class _DeltaLayer:
    """A delta's squashfs with its whiteouts spelled as OCI spells them; implements `Layer`."""

    has_whiteouts = True

    def __init__(self, layer: SquashfsLayer, path: Path) -> None:
        self._layer = layer
        self.name = f"the squashfs of {os.fspath(path)}"

    @contextmanager
    def open(self, which: Pass, progress: Progress | None = None) -> Iterator[EntryStream]:
        with self._layer.open(which, progress) as stream:
            yield _Translated(stream)


class _Translated:
    def __init__(self, stream: EntryStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Entry]:
        for entry in self._stream:
            if entry.kind is Kind.CHAR_DEVICE and entry.major == entry.minor == 0:
                parent, slash, name = entry.path.rstrip(b"/").rpartition(b"/")
                yield Entry(parent + slash + WHITEOUT_PREFIX + name, Kind.FILE)
            else:
                yield entry

    def data(self) -> Iterable[Piece]:
        return self._stream.data()
