"""What one tree has that another below it has not, as one more OverlayFS layer.

The layer, laid over the lower tree, shows exactly the upper one. In it are

- every name whose inode is another than below, with all its hard links: links never cross layers;
- character devices 0:0 (whiteouts) for names that are gone. Only where something of that name lies
  below: OverlayFS shows a whiteout in a directory that nothing is merged with. Opaque directories
  are spelled out this way, too, since squashfuse up to 0.6.1 may answer the attribute that marks
  them wrongly;
- the directories on the way to all that, and those whose attributes differ, with the attributes
  they have in the end: OverlayFS takes them from the topmost layer that has the directory.

Not for reading content: a tree says which entry of which layer has won (`tree`), and `emit_delta`
takes the winners from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sif_tools.errors import ConvertError
from sif_tools.merge.merger import IMPLICIT_DIRECTORY, Layer, Pass, located
from sif_tools.merge.tree import INODE_MASK, Directory, Tree
from sif_tools.tarstream.entry import Entry, Kind
from sif_tools.tarstream.writer import TarWriter

WHITEOUT: Final = Entry(b"", Kind.CHAR_DEVICE, mode=0)

SameLeaf = Callable[[int, int], bool]


@dataclass(slots=True)
class Delta:
    """`leaves`: for each inode its sorted paths. Paths are normalised, directories sorted."""

    directories: list[tuple[bytes, Entry]] = field(default_factory=list)
    whiteouts: list[bytes] = field(default_factory=list)
    leaves: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def inodes(self) -> int:
        return len(self.directories) + len(self.whiteouts) + len(self.leaves)

    def layers(self) -> list[int]:
        """Numbers of the layers that content is taken from."""
        return sorted({inode >> 32 for inode in self.leaves})


def compare(lower: Tree, upper: Tree, same: SameLeaf) -> Delta:
    """The layer that makes `upper` of `lower`.

    `same` says of two leaves whether they are one inode; those that it says nothing about (hard
    links) are found here.
    """
    whiteouts: list[bytes] = []
    leaves: dict[bytes, int] = {}
    wanted: set[bytes] = set()
    todo = [(b"", lower.root, upper.root)]
    while todo:
        path, low, up = todo.pop()
        if not _same_attributes(low.entry, up.entry):
            wanted.add(path)
        prefix = path + b"/" if path else b""
        whiteouts += [prefix + name for name in low.children.keys() - up.children.keys()]
        for name, child in up.children.items():
            below = low.children.get(name)
            if isinstance(child, Directory):
                if isinstance(below, Directory):
                    todo.append((prefix + name, below, child))
                else:
                    _add_all(prefix + name, child, wanted, leaves)
            elif not isinstance(below, int) or not same(below, child):
                leaves[prefix + name] = child & INODE_MASK
    _add_broken_groups(lower, upper, same, leaves)
    for path in (*whiteouts, *leaves, *wanted.copy()):
        _add_parents(path, wanted)
    # A layer needs a root, and it is nobody's child.
    wanted.add(b"")
    delta = Delta(whiteouts=sorted(whiteouts))
    for path in sorted(wanted):
        node = upper.find(path)
        assert isinstance(node, Directory)
        delta.directories.append((path, node.entry or IMPLICIT_DIRECTORY))
    for path in sorted(leaves):
        delta.leaves.setdefault(leaves[path], []).append(path)
    return delta


def _add_all(path: bytes, node: Directory, wanted: set[bytes], leaves: dict[bytes, int]) -> None:
    """A directory where below is none: all of it is new."""
    todo = [(path, node)]
    while todo:
        path, node = todo.pop()
        wanted.add(path)
        for name, child in node.children.items():
            if isinstance(child, Directory):
                todo.append((path + b"/" + name, child))
            else:
                leaves[path + b"/" + name] = child & INODE_MASK


def _add_broken_groups(lower: Tree, upper: Tree, same: SameLeaf, leaves: dict[bytes, int]) -> None:
    """Hard links whose set of names is not what it is below: all of them go into the layer, or a
    file would have another link count, and two names of it would be two files."""
    if not upper.linked and not lower.linked:
        return
    # A leaf that is only in the lower tree (generated there) cannot be linked to.
    inodes = upper.linked | lower.linked
    before, after = lower.linked_paths(inodes), upper.linked_paths(inodes)
    for inode, paths in after.items():
        if paths and paths != before[inode]:
            leaves |= dict.fromkeys(paths, inode)


def _add_parents(path: bytes, wanted: set[bytes]) -> None:
    while path:
        path = path.rpartition(b"/")[0]
        if path in wanted:
            return
        wanted.add(path)


def _same_attributes(one: Entry | None, other: Entry | None) -> bool:
    one, other = one or IMPLICIT_DIRECTORY, other or IMPLICIT_DIRECTORY
    return one is other or (
        (one.mode, one.uid, one.gid, one.mtime_s)
        == (other.mode, other.uid, other.gid, other.mtime_s)
        and one.xattrs == other.xattrs
    )


def emit_delta(
    delta: Delta,
    layers: Sequence[Layer],
    verified: int,
    writer: TarWriter,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write the layer's tar; returns the number of inodes in it.

    Only those of `layers` are read that have content in it. The first `verified` were not indexed
    now (their tree was known), so what they deliver is checked like in a first pass. `progress` is
    told the bytes of the stream so far.
    """
    for path, entry in delta.directories:
        writer.add(path, entry)
    for path in delta.whiteouts:
        writer.add(path, WHITEOUT)
    found = 0
    for number in delta.layers():
        layer = layers[number]
        which = Pass.INDEX if number < verified else Pass.EMIT
        with located(layer), layer.open(which) as stream:
            for ordinal, entry in enumerate(stream):
                paths = delta.leaves.get(number << 32 | ordinal)
                if paths is None:
                    continue
                try:
                    writer.add(paths[0], entry, stream.data())
                except ConvertError as error:
                    raise error.located(entry=entry.path) from None
                found += 1
                if progress is not None:
                    progress(writer.total_bytes)
    if found != len(delta.leaves):
        raise ConvertError(
            f"{len(delta.leaves)} files were found first and {found} when they were read again: "
            "the source has changed meanwhile"
        )
    _emit_links(delta.leaves.values(), writer)
    return delta.inodes


def _emit_links(groups: Iterable[Sequence[bytes]], writer: TarWriter) -> None:
    for paths in groups:
        for path in paths[1:]:
            writer.add(path, Entry(path, Kind.HARDLINK, mode=0o644, link_target=paths[0]))
