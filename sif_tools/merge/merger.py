"""The two passes over the layers: index who wins, then emit the winners.

Knows layers only as streams of entries; where they come from (an OCI blob, a directory, memory)
is the `Layer`'s matter. A failure names the layer and the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Final, Protocol

from sif_tools.errors import ConvertError
from sif_tools.limits import DEFAULT_LIMITS, Limits
from sif_tools.merge import names
from sif_tools.merge.names import Marker
from sif_tools.merge.tree import INODE_MASK, MAX_LAYERS, Tree, inode_id
from sif_tools.tarstream.entry import Entry, EntryStream, Kind
from sif_tools.tarstream.writer import TarWriter

Progress = Callable[[int], None]

# What a directory is that no layer describes.
IMPLICIT_DIRECTORY: Final = Entry(b"", Kind.DIRECTORY, mode=0o755)


class Pass(Enum):
    """Which of the two passes a layer is opened for: each verifies another of its digests."""

    INDEX = "index"
    EMIT = "emit"


class Layer(Protocol):
    """A layer that can be read twice and delivers the same entries in the same order."""

    @property
    def name(self) -> str:
        """How an error names it."""

    @property
    def has_whiteouts(self) -> bool:
        """Whether `.wh.` names are whiteouts (OCI) or only names (a directory)."""

    def open(
        self, which: Pass, progress: Progress | None = None
    ) -> AbstractContextManager[EntryStream]:
        """Start a pass. `progress` is told the bytes that were read of the layer so far."""


class Merger:
    """Layers, bottom first, merged into one stream.

    `index` each layer in order, then `emit` them all once. Layers may be added that depend on
    what is there (`tree`), as long as all are indexed before anything is emitted.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.tree = Tree()
        self._limits = limits
        self._layers: list[Layer] = []

    @classmethod
    def above(cls, tree: Tree, layers: Sequence[Layer], limits: Limits = DEFAULT_LIMITS) -> Merger:
        """A merger that has `layers` behind it already, which made `tree`; takes the tree over."""
        merger = cls(limits)
        merger.tree, merger._layers = tree, list(layers)
        return merger

    @property
    def layers(self) -> Sequence[Layer]:
        """All layers so far, bottom first."""
        return self._layers

    def index(self, layer: Layer, progress: Progress | None = None) -> None:
        """First pass over one layer: apply its names to the tree."""
        number = len(self._layers)
        if number >= MAX_LAYERS:
            raise ConvertError(f"more than {MAX_LAYERS} layers")
        self._layers.append(layer)
        tree, limits = self.tree, self._limits
        content_bytes = 0
        with located(layer), layer.open(Pass.INDEX, progress) as stream:
            for ordinal, entry in enumerate(stream):
                try:
                    content_bytes += entry.size_bytes
                    limits.check_content(ordinal, content_bytes)
                    path = names.normalise(entry.path)
                    what, about = names.marker(path) if layer.has_whiteouts else (Marker.NONE, path)
                    if what is Marker.NONE:
                        _check(entry, path)
                        tree.add(path, entry, number, ordinal)
                    elif what is Marker.WHITEOUT:
                        tree.whiteout(about, number)
                    elif what is Marker.OPAQUE:
                        tree.opaque(about, number)
                except ConvertError as error:
                    raise error.located(entry=entry.path) from None

    def emit(
        self,
        writer: TarWriter,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Second pass: write the merged tree; returns the number of inodes in it.

        `progress` is told the index of the layer and the bytes read of it so far.
        """
        directories, leaves = self.tree.count()
        for path, node in self.tree.directories():
            writer.add(path, node.entry or IMPLICIT_DIRECTORY)
        linked = self.tree.linked_paths()
        files = 0
        for number, layer in enumerate(self._layers):
            told = None if progress is None else _for_layer(progress, number)
            with located(layer), layer.open(Pass.EMIT, told) as stream:
                files += self._emit_layer(number, stream, writer, linked)
        links = 0
        for paths in linked.values():
            for path in paths[1:]:
                link = Entry(path, Kind.HARDLINK, mode=0o644, link_target=paths[0])
                writer.add(path, link)
                links += 1
        if files + links != leaves:
            raise ConvertError(
                f"{leaves} files were found first and {files + links} when they were read again: "
                "the source has changed meanwhile"
            )
        return directories + files

    def _emit_layer(
        self,
        number: int,
        stream: EntryStream,
        writer: TarWriter,
        linked: dict[int, list[bytes]],
    ) -> int:
        find = self.tree.find
        files = 0
        for ordinal, entry in enumerate(stream):
            if entry.kind is Kind.DIRECTORY or entry.kind is Kind.HARDLINK:
                continue
            inode = inode_id(number, ordinal)
            try:
                if inode in linked:
                    # The first of the names it has in the end carries the content: its own name
                    # may be gone while links to it are not.
                    paths = linked[inode]
                    if not paths:
                        continue
                    path = paths[0]
                else:
                    path = names.normalise(entry.path)
                    winner = find(path)
                    if not isinstance(winner, int) or winner & INODE_MASK != inode:
                        continue
                writer.add(path, entry, stream.data())
                files += 1
            except ConvertError as error:
                raise error.located(entry=entry.path) from None
        return files


def _check(entry: Entry, path: bytes) -> None:
    if entry.kind is Kind.HARDLINK:
        entry.link_target = names.normalise(entry.link_target)
    elif entry.kind is Kind.SYMLINK:
        names.check_symlink(entry.link_target, path)


def _for_layer(progress: Callable[[int, int], None], number: int) -> Progress:
    return lambda done_bytes: progress(number, done_bytes)


@contextmanager
def located(layer: Layer) -> Iterator[None]:
    try:
        yield
    except ConvertError as error:
        raise error.located(layer=layer.name) from error.__cause__


def merge(layers: Sequence[Layer], writer: TarWriter) -> int:
    """Both passes over a fixed list of layers, the archive ended; returns the inode count."""
    merger = Merger()
    for layer in layers:
        merger.index(layer)
    inodes = merger.emit(writer)
    writer.close()
    return inodes
