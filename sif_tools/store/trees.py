"""The names in a base as a file, so that a delta can be made without reading the base's layers.

A zstd frame of JSON::

    {"version": 1, "linked": [inode …], "directories": [[path, layer, entry, names, leaves] …]}
    entry   null, or [mode, uid, gid, mtime_s, {xattr: value} or null]
    names   of the leaves, joined by NUL; leaves: their integers, as in `merge.tree`

with bytes as Latin-1 text. A directory comes after its parent. Not trusted more than it must be:
the store names it by its digest, and whoever reads it compares.
"""

from __future__ import annotations

import json
from typing import Any, Final

import zstandard

from sif_tools.errors import StoreDamaged
from sif_tools.merge.tree import Directory, Tree
from sif_tools.tarstream.entry import NO_XATTRS, Entry, Kind

_VERSION: Final = 1
_LEVEL: Final = 3
# A million names of 4 KiB; what is in a store was made by a converter, but its disk may fail.
_MAX_BYTES: Final = 4 << 30


def dump_tree(tree: Tree) -> bytes:
    """The same tree gives the same bytes."""
    rows = [_row(path, node) for path, node in tree.directories()]
    node = {"version": _VERSION, "linked": sorted(tree.linked), "directories": rows}
    return zstandard.ZstdCompressor(level=_LEVEL).compress(
        json.dumps(node, separators=(",", ":")).encode()
    )


def load_tree(data: bytes) -> Tree:
    """StoreDamaged for what `dump_tree` has not made."""
    try:
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_BYTES)
        node = json.loads(plain)
        return _tree(node)
    except (zstandard.ZstdError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreDamaged(f"the list of names in a base is broken: {error!r}") from error


def _tree(node: Any) -> Tree:
    if node["version"] != _VERSION:
        raise ValueError(f"version {node['version']!r}")
    tree = Tree()
    tree.linked = set(node["linked"])
    by_path = {"": tree.root}
    for path, layer, entry, names, leaves in node["directories"]:
        if path:
            parent, _, name = path.rpartition("/")
            directory = by_path[path] = Directory(layer)
            by_path[parent].children[name.encode("latin-1")] = directory
        else:
            directory = tree.root
            directory.layer = layer
        directory.entry = None if entry is None else _entry(entry)
        if names:
            keys = names.encode("latin-1").split(b"\0")
            directory.children.update(zip(keys, leaves, strict=True))
    tree.forget_cache()
    return tree


def _row(path: bytes, node: Directory) -> list[Any]:
    leaves = {name: child for name, child in node.children.items() if isinstance(child, int)}
    names = sorted(leaves)
    return [
        path.decode("latin-1"),
        node.layer,
        None if node.entry is None else _entry_node(node.entry),
        b"\0".join(names).decode("latin-1"),
        [leaves[name] for name in names],
    ]


def _entry_node(entry: Entry) -> list[Any]:
    xattrs = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in sorted(entry.xattrs.items())
    }
    return [entry.mode, entry.uid, entry.gid, entry.mtime_s, xattrs or None]


def _entry(node: Any) -> Entry:
    mode, uid, gid, mtime_s, xattrs = node
    found = NO_XATTRS
    if xattrs:
        found = {name.encode("latin-1"): value.encode("latin-1") for name, value in xattrs.items()}
    return Entry(b"", Kind.DIRECTORY, mode, uid, gid, mtime_s, xattrs=found)
