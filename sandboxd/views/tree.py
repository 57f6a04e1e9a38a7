"""What there is to see, and its inode numbers::

    /                                inode 1; lists nothing: who has no name finds nothing
    /NAME/                           a sandbox's: (index << 20)
    /NAME/meminfo ...                the files of FILES: + 1, 2 ...
    /NAME/cpu/                       + CPU_DIRECTORY, goes over /sys/devices/system/cpu
    /NAME/cpu/online ...             the files of CPU_FILES
    /NAME/cpu/cpuN/topology/core_id  + 1024 + 16 N ...
    /NAME/cgroups                    + CGROUPS, goes over /proc/cgroups
    /NAME/cgroup/memory.max ...      + CGROUP_DIRECTORY, goes over /sys/fs/cgroup
    /NAME/cgroup/memory/memory.limit_in_bytes ...   directories of v1
    /NAME/cgroup/eN/memory.max ...   + EXEC_FIRST + 32 (N mod EXECS): a command's; not listed

CPUs keep the numbers they have on the host, with gaps, as a kernel shows them whose other CPUs are
offline. Renumbered from 0 they would look nicer and be wrong: sched_getcpu(3) and rseq(2) give the
real number, and allocators that keep a cache for each CPU size an array by the highest number in
``possible`` and index it with that.

Inode numbers are arithmetic, without a table, and are never used again: an index is one sandbox's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sandboxd.views import cgroup_files

ROOT: Final = 1  # FUSE_ROOT_ID

SHIFT: Final = 20
FILES: Final = ("meminfo", "cpuinfo", "stat", "loadavg", "uptime", "swaps", "diskstats")
CPU_DIRECTORY: Final = 64
CGROUPS: Final = 96
CGROUP_DIRECTORY: Final = 128
_V1_FIRST: Final = 256
_V1_STRIDE: Final = 16
EXEC_FIRST: Final = 1 << 19
_EXEC_STRIDE: Final = 32
EXECS: Final = ((1 << SHIFT) - EXEC_FIRST) // _EXEC_STRIDE
_EXEC_NAME: Final = re.compile(r"e(0|[1-9][0-9]{0,9})", re.ASCII)
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
CPUS_MAX: Final = (EXEC_FIRST - _CPU_FIRST) // _CPU_STRIDE


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
    "cgroups": Node(CGROUPS, "cgroups", directory=False),
    "cgroup": Node(CGROUP_DIRECTORY, "cgroup", directory=True),
}
_CPU: Final = {
    name: Node(CPU_DIRECTORY + 1 + i, name, directory=False) for i, name in enumerate(CPU_FILES)
}
_V1: Final = {
    Node(_V1_FIRST + _V1_STRIDE * i, name, directory=True): [
        Node(_V1_FIRST + _V1_STRIDE * i + 1 + k, file, directory=False)
        for k, file in enumerate(files)
    ]
    for i, (name, files) in enumerate(cgroup_files.V1_FILES.items())
}
_FIXED: Final = {
    node.local: node
    for nodes in (_TOP.values(), _CPU.values(), _V1, *_V1.values())
    for node in nodes
}
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
    if local >= EXEC_FIRST:
        first = local - (local - EXEC_FIRST) % _EXEC_STRIDE
        return next((node for node in _cgroup(first) if node.local == local), None)
    if local < _CPU_FIRST:
        found = _FIXED.get(local)
        if found is None:
            found = next((node for node in _cgroup(CGROUP_DIRECTORY) if node.local == local), None)
        return found
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
    if node.local == CGROUP_DIRECTORY:
        return [*_cgroup(CGROUP_DIRECTORY)[1:], *_V1]
    if node in _V1:
        return _V1[node]
    if not node.directory:
        return []
    if node.local >= EXEC_FIRST:
        return _cgroup(node.local)[1:]
    directory, topology, *files = _cpu_nodes(node.cpu)
    return [topology] if node.local == directory.local else files


def child(node: Node, name: str, cpus: Sequence[int]) -> Node | None:
    if node.local == CGROUP_DIRECTORY and (match := _EXEC_NAME.fullmatch(name)):
        return _cgroup(EXEC_FIRST + int(match[1]) % EXECS * _EXEC_STRIDE)[0]
    return next((found for found in children(node, cpus) if found.name == name), None)


def is_cgroup_file(node: Node) -> bool:
    return not node.directory and (
        CGROUP_DIRECTORY < node.local < _CPU_FIRST or node.local >= EXEC_FIRST
    )


def is_of_command(node: Node) -> bool:
    """Below a directory eN: there are as many as programs ask for."""
    return node.local >= EXEC_FIRST


def _cgroup(first: int) -> list[Node]:
    """A directory of v2 and its files."""
    return [
        Node(first, "cgroup", directory=True),
        *(Node(first + 1 + i, name, directory=False) for i, name in enumerate(cgroup_files.FILES)),
    ]


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
