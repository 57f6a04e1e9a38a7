"""What there is to see, and its inode numbers::

    /                                inode 1; lists nothing: who has no name finds nothing
    /NAME/                           a sandbox's: (index << 20)
    /NAME/meminfo ...                the files of FILES: + 1, 2 ...
    /NAME/cpu/                       + CPU_DIRECTORY, goes over /sys/devices/system/cpu
    /NAME/cpu/online ...             the files of CPU_FILES
    /NAME/cpu/cpuN/topology/core_id  + 1024 + 16 N ...

CPUs keep the numbers they have on the host, with gaps, as a kernel shows them whose other CPUs are
offline. Renumbered from 0 they would look nicer and be wrong: sched_getcpu(3) and rseq(2) give the
real number, and allocators that keep a cache for each CPU size an array by the highest number in
``possible`` and index it with that.

Inode numbers are arithmetic, without a table, and are never used again: an index is one sandbox's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ROOT: Final = 1  # FUSE_ROOT_ID

SHIFT: Final = 20
FILES: Final = ("meminfo", "cpuinfo", "stat", "loadavg", "uptime", "swaps", "diskstats")
CPU_DIRECTORY: Final = 64
CPU_FILES: Final = ("online", "possible", "present", "kernel_max", "offline", "isolated")
TOPOLOGY_FILES: Final = (
    "core_id",
    "physical_package_id",
    "core_cpus",
    "core_cpus_list",
    "thread_siblings",
    "thread_siblings_list",
    "package_cpus",
    "package_cpus_list",
    "core_siblings",
    "core_siblings_list",
)
_CPU_FIRST: Final = 1024
_CPU_STRIDE: Final = 16
CPUS_MAX: Final = ((1 << SHIFT) - _CPU_FIRST) // _CPU_STRIDE


@dataclass(frozen=True, slots=True)
class Node:
    """A file or directory of one sandbox. ``cpu`` is -1 above the directories of CPUs."""

    local: int
    name: str
    directory: bool
    cpu: int = -1


_TOP: Final = {
    **{name: Node(1 + i, name, directory=False) for i, name in enumerate(FILES)},
    "cpu": Node(CPU_DIRECTORY, "cpu", directory=True),
}
_CPU: Final = {
    name: Node(CPU_DIRECTORY + 1 + i, name, directory=False) for i, name in enumerate(CPU_FILES)
}
_FIXED: Final = {node.local: node for node in (*_TOP.values(), *_CPU.values())}
_SLOT: Final = Node(0, "", directory=True)


def inode(index: int, node: Node) -> int:
    return index << SHIFT | node.local


def index_of(number: int) -> int:
    """Whose an inode is; sandboxes' indices begin at 1."""
    return number >> SHIFT


def node_at(number: int, cpus: Sequence[int]) -> Node | None:
    """The node with an inode number; None where these CPUs have none such."""
    local = number & ((1 << SHIFT) - 1)
    if local == 0:
        return _SLOT
    if local < _CPU_FIRST:
        return _FIXED.get(local)
    cpu, kind = divmod(local - _CPU_FIRST, _CPU_STRIDE)
    if cpu not in cpus:
        return None
    return next((node for node in _cpu_nodes(cpu) if node.local == _cpu_local(cpu, kind)), None)


def children(node: Node, cpus: Sequence[int]) -> list[Node]:
    """What a directory lists, in order of inode numbers."""
    if node.local == 0:
        return list(_TOP.values())
    if node.local == CPU_DIRECTORY:
        return [*_CPU.values(), *(_cpu_nodes(cpu)[0] for cpu in sorted(cpus))]
    if not node.directory:
        return []
    directory, topology, *files = _cpu_nodes(node.cpu)
    return [topology] if node.local == directory.local else files


def child(node: Node, name: str, cpus: Sequence[int]) -> Node | None:
    return next((found for found in children(node, cpus) if found.name == name), None)


def _cpu_local(cpu: int, kind: int) -> int:
    return _CPU_FIRST + cpu * _CPU_STRIDE + kind


def _cpu_nodes(cpu: int) -> list[Node]:
    """The directory cpuN, its ``topology``, and the files of that."""
    return [
        Node(_cpu_local(cpu, 0), f"cpu{cpu}", directory=True, cpu=cpu),
        Node(_cpu_local(cpu, 1), "topology", directory=True, cpu=cpu),
        *(
            Node(_cpu_local(cpu, 2 + i), name, directory=False, cpu=cpu)
            for i, name in enumerate(TOPOLOGY_FILES)
        ),
    ]
