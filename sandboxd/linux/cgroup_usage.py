"""What the groups below a named cgroup use, wherever in the hierarchy it lies.

For: an operator's view (``doctor``), now and then. It walks the whole hierarchy: cgroupspy's tree
on v1, the directories themselves on v2, which cgroupspy does not know. Not for a hot path; there
the few files of a known group are read through ``cgroup_limits``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cgroupspy.trees import Tree

from sandboxd.linux import cgroup
from sandboxd.linux.cgroup import CgroupLayout
from sandboxd.linux.cgroup_limits import LimitsV2


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """One group and all below it. ``processes`` are those right in it."""

    name: str
    memory_bytes: int
    processes: int


def usage_below(layout: CgroupLayout, parent: str) -> list[GroupUsage]:
    """The children of every cgroup called ``parent`` in the hierarchy of the memory controller.

    Empty where there is none. Groups that vanish while it looks are passed over.
    """
    version = layout.version_of("memory")
    if version is None:
        return []
    mount = layout.mount_of("memory")
    assert mount is not None
    found = _walk_v1(mount, parent) if version == 1 else _walk_v2(mount, parent)
    return sorted(found, key=lambda usage: usage.name)


def _walk_v1(mount: Path, parent: str) -> Iterator[GroupUsage]:
    # A tree's root is where hierarchies are mounted, and each hierarchy a group of it.
    try:
        tree = Tree(root_path=str(mount.parent), groups=[mount.name.encode()])
    except FileNotFoundError:  # a group went while the tree was read
        return
    for node in tree.walk():
        if node.parent is None or node.parent.name != parent.encode() or node.controller is None:
            continue
        try:
            yield GroupUsage(
                node.name.decode(errors="replace"),
                int(node.controller.usage_in_bytes),
                len(node.controller.procs),
            )
        except OSError:
            continue


def _walk_v2(mount: Path, parent: str) -> Iterator[GroupUsage]:
    limits = LimitsV2()
    for path in cgroup.subtree(mount):
        if path.parent.name != parent:
            continue
        try:
            yield GroupUsage(path.name, limits.memory_bytes(path), len(cgroup.processes(path)))
        except OSError:
            continue
