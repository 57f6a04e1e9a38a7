"""The part of the cgroup hierarchies that is the node's: made by root, owned by the launcher's id.

Below it the launcher makes, limits and removes the sandboxes' cgroups with its own rights: a v1
``cgroup.procs`` may be written for a process of one's own id, and clone3 into a v2 cgroup asks for
write access up to the common ancestor, which is why launcher and zygote live in ``node`` below it.
The node's own limit files stay root's.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from sandboxd.errors import FeatureMissing
from sandboxd.launcher.cgroups import CONTROLLERS, IO_CONTROLLERS, NodeCgroups
from sandboxd.linux import cgroup
from sandboxd.linux.cgroup_limits import CPU_SHARES_DEFAULT, CPU_SHARES_MAX, LimitsV2
from sandboxd.linux.delegation import GIVEN_FILES, SUPERVISOR, own_cgroup
from sandboxd.model import CPU_WEIGHT_MAX

NODE: Final = "node"


def living_directories(hostd_pid: int, name: str) -> frozenset[Path]:
    """Where the node of this hostd has its cgroups, in every hierarchy."""
    layout = cgroup.layout(hostd_pid)
    found = {path / name for path in layout.own.values()}
    v2 = layout.own.get("")
    if v2 is not None and v2.name == SUPERVISOR:
        found.add(v2.parent / name)  # it has made room for its own controllers
    return frozenset(found)


def make_node_cgroups(name: str, owner: int, *, io: bool = False) -> NodeCgroups:
    """Make the node's cgroups, emptied of what an earlier node left, and give them to ``owner``.

    ``io``: whether there are devices whose use can be limited.
    """
    layout = cgroup.layout()
    if layout.v2_mount is None:
        raise FeatureMissing(
            "no cgroup2 hierarchy is mounted; execs could not be killed exactly",
            hint="mount -t cgroup2 none /sys/fs/cgroup/unified",
        )
    own_v2 = own_cgroup(layout.own.get("", layout.v2_mount))
    wanted = (*CONTROLLERS, *(IO_CONTROLLERS if io else ()))
    v2_controllers = frozenset(c for c in wanted if layout.version_of(c) == 2)
    if v2_controllers:
        if own_v2 != layout.v2_mount:  # the hierarchy's root may hold processes all the same
            make_room(own_v2)
        v2_controllers = cgroup.enable_controllers(own_v2, v2_controllers)
    v2 = own_v2 / name
    v1 = {
        controller: layout.own.get(controller, layout.v1[controller]) / name
        for controller in wanted
        if layout.version_of(controller) == 1
    }
    found = NodeCgroups(v2, v1, v2_controllers)
    remove_node_cgroups(found)
    for path in (v2, *v1.values()):
        cgroup.make(path)
    if "cpuset" in v1:
        _open_cpuset(v1["cpuset"])
    if v2_controllers:
        cgroup.enable_controllers(v2, v2_controllers)
    cgroup.make(v2 / NODE)
    weigh(found)
    for path in (v2, v2 / NODE, *v1.values()):
        os.chown(path, owner, owner)
        for file in (*GIVEN_FILES, "tasks"):
            with suppress(FileNotFoundError):
                os.chown(path / file, owner, owner)
    return found


def weigh(node: NodeCgroups) -> None:
    """How much of the CPUs the sandboxes have beside others, and what serves them beside them.

    A cgroup's weight is divided among the CPUs that it runs on (``calc_group_shares`` in
    kernel/sched/fair.c). On v1 what serves is in no cgroup of its own, each process against all
    sandboxes: these get the weight of one process for every CPU, or on each they would have a
    fraction of it. On v2 it is in a cgroup beside theirs: there it has the most there is.
    """
    if "cpu" in node.v1:
        count = len(os.sched_getaffinity(0))
        shares = min(CPU_SHARES_MAX, CPU_SHARES_DEFAULT * count)
        cgroup.write(node.v1["cpu"] / "cpu.shares", shares)
    if "cpu" in node.v2_controllers and node.v2 is not None:
        LimitsV2().set_cpu_weight(node.v2 / NODE, CPU_WEIGHT_MAX)


def _open_cpuset(path: Path) -> None:
    """A v1 cpuset takes no task until it has CPUs and memory nodes; its children copy them."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        cgroup.write(path / name, (path.parent / name).read_text(encoding="ascii").strip())
    cgroup.write(path / "cgroup.clone_children", 1)


def remove_node_cgroups(node: NodeCgroups, timeout_s: float = 10.0) -> None:
    """Kill whatever is in the node's cgroups and remove them. OSError if one cannot be."""
    deadline = time.monotonic() + timeout_s
    if node.v2 is not None:
        with suppress(FileNotFoundError):
            cgroup.kill(node.v2)
    for path in reversed(node.directories):
        cgroup.remove_tree(path, deadline)


def make_room(own: Path) -> None:
    """Move what is in a v2 cgroup below it: it may hold no process once its controllers are handed
    on."""
    cgroup.make(own / SUPERVISOR)
    for pid in cgroup.processes(own):
        with suppress(ProcessLookupError):
            cgroup.add_process(own / SUPERVISOR, pid)
