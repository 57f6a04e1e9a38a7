"""The merged tree of names: which entry of which layer has won each path.

A leaf is one integer, so that a million of them fit into memory::

    bits 46..59  layer that put the name there      (what a whiteout looks at)
    bits 32..45  layer of the entry with the inode  (differs for a hard link to a lower layer)
    bits  0..31  number of that entry in its layer

A directory is an object with its children and its attributes. Every operation costs what it
creates or removes, so a layer costs what it holds, however its whiteouts are written: a subtree
is pruned at most once a layer, and remembers it (`pruned_by`).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Final

from sif_tools.errors import BadEntry
from sif_tools.tarstream.entry import Entry, Kind

MAX_LAYERS: Final = (1 << 14) - 1
_NAME_SHIFT: Final = 46
INODE_MASK: Final = (1 << _NAME_SHIFT) - 1


def inode_id(layer: int, ordinal: int) -> int:
    """The number of the inode that entry `ordinal` of `layer` carries."""
    return layer << 32 | ordinal


class Directory:
    """A directory; `entry` is None while no layer has said what its attributes are."""

    __slots__ = ("children", "entry", "layer", "pruned_by")

    def __init__(self, layer: int) -> None:
        self.children: dict[bytes, Directory | int] = {}
        self.entry: Entry | None = None
        self.layer = layer
        # Born in this layer, it holds nothing that this layer could hide.
        self.pruned_by = layer


class Tree:
    """Apply layers from the bottom up, entry by entry; then ask who has won."""

    def __init__(self) -> None:
        self.root = Directory(0)
        self.linked: set[int] = set()
        self._cached_path: bytes | None = None
        self._cached_node = self.root

    # ── applying ────────────────────────────────────────────────────────────────────────────────

    def add(self, path: bytes, entry: Entry, layer: int, ordinal: int) -> None:
        """Put an entry at a normalised path; BadEntry for a link to nothing and the like."""
        if not path:
            if entry.kind is not Kind.DIRECTORY:
                raise BadEntry("the root of an image must be a directory")
            self.root.entry, self.root.layer = entry, layer
            return
        leaf = inode_id(layer, ordinal)
        if entry.kind is Kind.HARDLINK:
            found = self.find(entry.link_target)
            if not isinstance(found, int):
                what = "nothing" if found is None else "a directory"
                raise BadEntry(f"a hard link to {what}, {entry.link_target!r}")
            if entry.link_target == path:
                return
            leaf = found & INODE_MASK
            self.linked.add(leaf)
        parent_path, _, name = path.rpartition(b"/")
        children = self._make_parent(parent_path, layer).children
        existing = children.get(name)
        if entry.kind is Kind.DIRECTORY:
            if not isinstance(existing, Directory):
                existing = children[name] = Directory(layer)
            existing.entry, existing.layer = entry, layer
            return
        if isinstance(existing, Directory):
            self._cached_path = None
        children[name] = layer << _NAME_SHIFT | leaf

    def whiteout(self, path: bytes, layer: int) -> None:
        """Hide what lower layers have at a path; this layer's own stays, wherever it stands."""
        parent_path, _, name = path.rpartition(b"/")
        parent = self.find(parent_path)
        if not isinstance(parent, Directory):
            return
        child = parent.children.get(name)
        if isinstance(child, Directory):
            self._cached_path = None
            self._prune(child, layer)
            if child.layer != layer and not child.children:
                del parent.children[name]
            else:
                _disown(child, layer)
        elif child is not None and child >> _NAME_SHIFT != layer:
            del parent.children[name]

    def opaque(self, path: bytes, layer: int) -> None:
        """Hide all that lower layers have below a directory, but not the directory."""
        node = self.find(path)
        if isinstance(node, Directory):
            self._cached_path = None
            self._prune(node, layer)

    def _make_parent(self, path: bytes, layer: int) -> Directory:
        """The directory at `path`, made where it is missing and in place of what is none."""
        if path == self._cached_path:
            return self._cached_node
        node = self.root
        if path:
            for part in path.split(b"/"):
                child = node.children.get(part)
                if not isinstance(child, Directory):
                    child = node.children[part] = Directory(layer)
                node = child
        self._cached_path, self._cached_node = path, node
        return node

    @staticmethod
    def _prune(top: Directory, layer: int) -> None:
        """Remove from below `top` all that is not of `layer`. Iterative: trees are deep at will."""
        if top.pruned_by == layer:
            return
        todo, found = [top], []
        while todo:
            node = todo.pop()
            found.append(node)
            todo += [
                child
                for child in node.children.values()
                if isinstance(child, Directory) and child.pruned_by != layer
            ]
        for node in reversed(found):  # children come before their parents
            kept: dict[bytes, Directory | int] = {}
            for name, child in node.children.items():
                if isinstance(child, int):
                    if child >> _NAME_SHIFT == layer:
                        kept[name] = child
                elif child.layer == layer or child.children:
                    _disown(child, layer)
                    kept[name] = child
            node.children = kept
            node.pruned_by = layer

    def copy(self) -> Tree:
        """The same tree, to apply more layers to; entries are shared, as nothing changes them."""
        made = Tree()
        made.linked = set(self.linked)
        todo = [(self.root, made.root)]
        while todo:
            source, target = todo.pop()
            target.entry, target.layer = source.entry, source.layer
            target.pruned_by = source.pruned_by
            children = target.children = dict(source.children)
            for name, child in children.items():
                if isinstance(child, Directory):
                    copied = children[name] = Directory(child.layer)
                    todo.append((child, copied))
        made.forget_cache()
        return made

    def forget_cache(self) -> None:
        """After the tree was changed from outside."""
        self._cached_path, self._cached_node = None, self.root

    # ── asking ──────────────────────────────────────────────────────────────────────────────────

    def find(self, path: bytes) -> Directory | int | None:
        """What is at a normalised path: a directory, a leaf or nothing."""
        if not path:
            return self.root
        parent_path, _, name = path.rpartition(b"/")
        if parent_path == self._cached_path:
            return self._cached_node.children.get(name)
        node = self.root
        if parent_path:
            for part in parent_path.split(b"/"):
                child = node.children.get(part)
                if not isinstance(child, Directory):
                    return None
                node = child
        self._cached_path, self._cached_node = parent_path, node
        return node.children.get(name)

    def directories(self) -> Iterator[tuple[bytes, Directory]]:
        """Every directory with its path, sorted, parents before children."""
        todo: list[tuple[bytes, Directory]] = [(b"", self.root)]
        while todo:
            path, node = todo.pop()
            yield path, node
            prefix = path + b"/" if path else b""
            below = [
                (prefix + name, child)
                for name, child in node.children.items()
                if isinstance(child, Directory)
            ]
            below.sort(key=lambda item: item[0], reverse=True)
            todo += below

    def linked_paths(self, inodes: Set[int] | None = None) -> dict[int, list[bytes]]:
        """For each inode that a hard link was ever made to (or each given one): the sorted paths
        it has in the end."""
        found: dict[int, list[bytes]] = {one: [] for one in sorted(inodes or self.linked)}
        if found:
            for path, node in self.directories():
                prefix = path + b"/" if path else b""
                for name, child in node.children.items():
                    if isinstance(child, int) and child & INODE_MASK in found:
                        found[child & INODE_MASK].append(prefix + name)
        for paths in found.values():
            paths.sort()
        return found

    def count(self) -> tuple[int, int]:
        """Directories (the root included) and names that are none."""
        directories = leaves = 0
        for _, node in self.directories():
            directories += 1
            leaves += sum(1 for child in node.children.values() if isinstance(child, int))
        return directories, leaves


def _disown(node: Directory, layer: int) -> None:
    """A hidden directory that this layer puts things into anew has no attributes from below."""
    if node.layer != layer:
        node.layer, node.entry = layer, None
