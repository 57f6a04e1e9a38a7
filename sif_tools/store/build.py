"""Make the SIFs of an image on local disk: a base, a shared part, a delta, or all in one.

What lies in a base or a shared part besides its layers is what `SingularityLayer` generates for an
image that says nothing about itself, so that each is a function of its layers alone. A delta holds
what the image's own config makes of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final

from sif_tools.errors import ConvertError
from sif_tools.format import DEFAULT_DESCRIPTORS, PartType
from sif_tools.image_config import DEFAULT_IMAGE_CONFIG
from sif_tools.image_objects import sif_objects, source_labels, squashfs_object
from sif_tools.merge.delta import Delta, SameLeaf, compare, emit_delta
from sif_tools.merge.merger import Merger
from sif_tools.merge.tree import INODE_MASK, Tree
from sif_tools.scratch import scratch_file
from sif_tools.singularity_d import SingularityLayer
from sif_tools.sources.source import Source
from sif_tools.squashfs import SquashfsOptions, squashfs_from_tar
from sif_tools.store.delta_object import delta_object
from sif_tools.tarstream.writer import TarWriter
from sif_tools.writer import DataObject, FileContent, write_sif_to

# A delta is signed at most; a table of the usual 48 would be most of a small one.
DELTA_DESCRIPTORS: Final = 8
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A finished file on local disk, without a name. `digest` is the hexadecimal SHA-256."""

    fd: int
    size_bytes: int
    digest: str


@contextmanager
def flat_sif(source: Source, options: SquashfsOptions) -> Iterator[LocalFile]:
    """The whole image in one file, the same bytes as `convert` makes."""
    merger = Merger()
    for layer in source.layers:
        merger.index(layer)
    labels = source_labels(source)
    merger.index(_generated(merger.tree, source, labels))
    with squashfs_from_tar(merger.emit, options) as (image, size):
        objects = sif_objects(source, labels, FileContent(image.fileno(), 0, size))
        with written_sif(objects, DEFAULT_DESCRIPTORS) as file:
            yield file


def extended(tree: Tree | None, source: Source, below: int, above: int) -> Tree:
    """The tree of the lowest `above` layers, made of that of the lowest `below`, by reading those
    in between."""
    lower = source.layers[:below]
    merger = Merger() if tree is None else Merger.above(tree.copy(), lower)
    for layer in source.layers[below:above]:
        merger.index(layer)
    return merger.tree


@contextmanager
def base_sif(
    tree: Tree, source: Source, above: int, options: SquashfsOptions
) -> Iterator[LocalFile]:
    """The lowest `above` layers, whose tree this is, as an image of its own."""
    nameless = _nameless(source, above)
    merger = Merger.above(tree.copy(), source.layers[:above])
    labels = source_labels(nameless)
    merger.index(_generated(merger.tree, nameless, labels))
    with squashfs_from_tar(merger.emit, options) as (image, size):
        objects = sif_objects(nameless, labels, FileContent(image.fileno(), 0, size))
        with written_sif(objects, DEFAULT_DESCRIPTORS) as file:
            yield file


@contextmanager
def shared_sif(
    lower: Tree, upper: Tree, source: Source, cuts: tuple[int, int], options: SquashfsOptions
) -> Iterator[LocalFile]:
    """What the layers between two cuts add to those below, as an overlay partition."""
    below, above = cuts
    nameless = _nameless(source, above)
    layers = tuple(diff_ids(source)[below:above])
    with _delta_squashfs(lower, below, upper, nameless, options) as content:
        objects = [
            delta_object(layers=layers),
            squashfs_object(content, PartType.OVERLAY, source.architecture),
        ]
        with written_sif(objects, DELTA_DESCRIPTORS) as file:
            yield file


@contextmanager
def delta_sif(
    lower: Tree,
    below: int,
    source: Source,
    sifs_below: Sequence[str],
    options: SquashfsOptions,
) -> Iterator[LocalFile]:
    """What makes the image of the SIFs below it (hexadecimal digests, base first), whose layers
    are the lowest `below` and whose tree is `lower`."""
    upper = extended(lower, source, below, len(source.layers))
    with _delta_squashfs(lower, below, upper, source, options) as content:
        said = delta_object(below=[f"sha256:{one}" for one in sifs_below])
        objects = sif_objects(
            source,
            source_labels(source),
            content,
            part_type=PartType.OVERLAY,
            more=[said],
        )
        with written_sif(objects, DELTA_DESCRIPTORS) as file:
            yield file


def diff_ids(source: Source) -> list[str]:
    """What names the content of each layer; [] where not all of them have such a name."""
    found = [getattr(layer, "diff_id", None) for layer in source.layers]
    names = [one for one in found if isinstance(one, str)]
    return names if len(names) == len(found) else []


def _nameless(source: Source, above: int) -> Source:
    """The lowest layers of an image as an image that says nothing about itself."""
    return Source("oci", source.layers[:above], DEFAULT_IMAGE_CONFIG, source.architecture, None)


def _generated(tree: Tree, source: Source, labels: dict[str, str]) -> SingularityLayer:
    return SingularityLayer(tree, source.config, labels, config_decides=source.has_config)


@contextmanager
def _delta_squashfs(
    lower: Tree, below: int, upper: Tree, source: Source, options: SquashfsOptions
) -> Iterator[FileContent]:
    """The difference of two trees without what is generated, that being put into each first."""
    nameless = _nameless(source, below)
    under = Merger.above(lower.copy(), source.layers[:below])
    under_generated = _generated(under.tree, nameless, source_labels(nameless))
    under.index(under_generated)
    over = Merger.above(upper.copy(), source.layers)
    over_generated = _generated(over.tree, source, source_labels(source))
    over.index(over_generated)
    same = _same_leaf(below, under_generated, len(source.layers), over_generated)
    delta = compare(under.tree, over.tree, same)

    def write(writer: TarWriter) -> int:
        return emit_delta(delta, over.layers, below, writer)

    _check(delta)
    with squashfs_from_tar(write, options) as (image, size):
        yield FileContent(image.fileno(), 0, size)


def _check(delta: Delta) -> None:
    if delta.inodes > 1 << 32:
        raise ConvertError("more inodes than a squashfs can hold")


def _same_leaf(
    under_layer: int, under: SingularityLayer, over_layer: int, over: SingularityLayer
) -> SameLeaf:
    """Inodes of layers are the same by their number, generated ones by what they are."""

    def same(low: int, high: int) -> bool:
        low, high = low & INODE_MASK, high & INODE_MASK
        low_generated, high_generated = low >> 32 == under_layer, high >> 32 == over_layer
        if low_generated != high_generated:
            return False
        if low_generated:
            return under.content[low & 0xFFFFFFFF] == over.content[high & 0xFFFFFFFF]
        return low == high

    return same


@contextmanager
def written_sif(objects: Sequence[DataObject], least_descriptors: int) -> Iterator[LocalFile]:
    with scratch_file("the finished SIF") as file:
        try:
            size = write_sif_to(file.fileno(), objects, least_descriptors=least_descriptors)
        except OSError as error:
            raise ConvertError(
                f"the SIF cannot be built: {error.strerror}",
                hint="TMPDIR chooses where it is built",
            ) from error
        yield LocalFile(file.fileno(), size, _digest(file))


def _digest(file: BinaryIO) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while data := file.read(_READ_BYTES):
        digest.update(data)
    return digest.hexdigest()
