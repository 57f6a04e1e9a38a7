"""The cgroups of the sandboxes on this node, below directories that hostd made ours.

For each sandbox one directory in every hierarchy that holds a limit, and one in cgroup2, where
PID 1 makes a further one for each exec, to kill exactly its processes. On a v2 node that is the
same directory; on a v1 node the cgroup2 hierarchy has no controllers and is there for that alone.
An ordinary user has a delegated part of cgroup2 or nothing: what no controller holds there a
watchdog holds as far as it can (``watchdog.py``).

Plain file writes and not cgroupspy: its nodes walk the whole tree when they are made, 1 ms for each
hundred cgroups, and this is on the way of every create.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sandboxd.launcher.watched import WATCHED, Watched
from sandboxd.linux import cgroup
from sandboxd.linux.cgroup_limits import CPU_WEIGHT_DEFAULT, IO_NONE, LimitsV1, LimitsV2
from sandboxd.model import Enforcement, Limits

RESERVE_BYTES: Final = 16 * 1024 * 1024
"""For PID 1, page tables and the kernel's own memory of a sandbox, on top of what it asked for."""

CONTROLLERS: Final = ("memory", "pids", "cpu", "cpuset")

V1_ENTRY: Final = "tasks"
"""By which a process of one thread enters a v1 cgroup itself, writing 0. Not ``cgroup.procs``: for
that the kernel holds up all forks and exits of the machine, which takes an RCU grace period (7 to
17 ms), under the lock that every mkdir of a cgroup waits for. For a thread that moves itself it
holds up nothing (cgroup_procs_write_start, Linux 6.1 and 6.18): 0.06 ms."""

IO_CONTROLLERS: Final = ("io", "blkio")
"""Of v2 and of v1; only where the writable layer has a device (ext4)."""


@dataclass(frozen=True, slots=True)
class NodeCgroups:
    """The node's directories: ``v2`` always, ``v1`` by controller where a v1 hierarchy has it.

    ``v2_controllers``: those of ``CONTROLLERS`` and ``IO_CONTROLLERS`` that v2 holds here. ``v2``
    None: there are none. ``watched``: a watchdog holds memory and processes, as nothing else does.
    """

    v2: Path | None
    v1: dict[str, Path]
    v2_controllers: frozenset[str]
    watched: bool = False
    one_id: bool = False
    """PID 1 has the id of its sandbox's root: there is no other."""

    @property
    def version(self) -> str:
        """What holds memory and processes: ``v1``, ``v2`` or ``watchdog``."""
        if self.watched:
            return "watchdog"
        return "v1" if self.v1 else "v2"

    @property
    def directories(self) -> tuple[Path, ...]:
        """The node's own, in every hierarchy."""
        return (*(() if self.v2 is None else (self.v2,)), *self.v1.values())

    def enforcement(self) -> dict[str, Enforcement]:
        """For each limit that a cgroup can hold, what holds it here."""
        have = self.v1.keys() | self.v2_controllers
        names = {
            "memory_mb": {"memory"},
            "pids": {"pids"},
            "cpus": {"cpu"},
            "cpu_weight": {"cpu"},
            "cpuset": {"cpuset"},
            "io_read_bps": {"io", "blkio"},
            "io_read_iops": {"io", "blkio"},
            # What is written is written back later: v1 does not know for whom.
            "io_write_bps": {"io"},
            "io_write_iops": {"io"},
        }
        watched = WATCHED if self.watched else ()
        return {
            limit: Enforcement.ENFORCED if have & controllers else Enforcement.NONE
            for limit, controllers in names.items()
        } | dict.fromkeys(watched, Enforcement.WATCHDOG)


@dataclass(slots=True)
class SandboxCgroups:
    """One sandbox's directories."""

    node: NodeCgroups
    v2: Path | None
    v1: dict[str, Path]
    cpu_weight: int = CPU_WEIGHT_DEFAULT
    cpuset: str = ""
    """As they are set; a new cgroup has the node's."""
    io: tuple[int, int, int, int] = IO_NONE
    devices: set[int] = field(default_factory=set)
    """For which ``io`` is set."""
    watched: Watched | None = None
    """Where the node's are watched."""

    @property
    def oom_kill_path(self) -> str | None:
        """The file that counts its OOM kills, in a line ``oom_kill N``."""
        if "memory" in self.v1:
            return str(self.v1["memory"] / "memory.oom_control")
        if self.v2 is not None and "memory" in self.node.v2_controllers:
            return str(self.v2 / "memory.events")
        return None

    def count_fd(self) -> tuple[int, ...]:
        """A copy of the descriptor of such a file, where it has no path."""
        return () if self.watched is None else (os.dup(self.watched.fd),)

    def limit(self, limits: Limits) -> None:
        """Set what a sandbox may use."""
        if self.watched is not None:
            self.watched.take(limits)
        if self.v2 is None:
            return
        memory_bytes = (limits.memory_mb + limits.disk_mb) * 1024 * 1024 + RESERVE_BYTES
        for controller in (*self.v1, *self.node.v2_controllers):
            path = self.v1.get(controller, self.v2)
            how = LimitsV1() if controller in self.v1 else LimitsV2()
            if controller == "memory":
                how.set_memory(path, memory_bytes)
            elif controller == "pids":
                how.set_pids(path, limits.pids + 1)  # PID 1 is counted too
            elif controller == "cpu":
                how.set_cpu(path, limits.cpus)
                if limits.cpu_weight != self.cpu_weight:
                    how.set_cpu_weight(path, limits.cpu_weight)
                    self.cpu_weight = limits.cpu_weight
            elif controller == "cpuset" and limits.cpuset != self.cpuset:
                # Of a slot that was primed for somebody else it may have to go: v1 takes no empty
                # list while tasks are in it.
                how.set_cpus(path, limits.cpuset or self._cpus_of_node(controller))
                self.cpuset = limits.cpuset
        self.io = (
            limits.io_read_bps,
            limits.io_write_bps,
            limits.io_read_iops,
            limits.io_write_iops,
        )

    def _cpus_of_node(self, controller: str) -> str:
        if controller not in self.v1:
            return "\n"  # an empty list: a write of nothing would change nothing
        return (self.v1[controller].parent / "cpuset.cpus").read_text(encoding="ascii").strip()

    def limit_devices(self, devices: Iterable[int]) -> None:
        """Hold what goes to the devices of a root's layers to ``io``; those of a memory file system
        are none."""
        if self.io == IO_NONE:
            return
        for device in set(devices) - self.devices:
            if os.major(device):
                self._set_io(device, self.io)
                self.devices.add(device)

    def lift_io(self) -> None:
        """Before it is killed: who waits for its turn at a disk cannot die before that."""
        for device in self.devices:
            with suppress(OSError):  # the device went with its last mount
                self._set_io(device, IO_NONE)
        self.devices.clear()

    def _set_io(self, device: int, io: tuple[int, int, int, int]) -> None:
        if "blkio" in self.v1:
            LimitsV1().set_io(self.v1["blkio"], device, io)
        elif self.v2 is not None and "io" in self.node.v2_controllers:
            LimitsV2().set_io(self.v2, device, io)

    def open_for_pid1(self) -> list[int]:
        """The cgroup2 directory, then each v1 ``tasks``, in M_SETUP's order; none where there are
        no cgroups: PID 1 then kills and counts its execs by itself."""
        if self.v2 is None:
            return []
        with ExitStack() as undo:
            fds = [cgroup.open_directory(self.v2)]
            undo.callback(os.close, fds[0])
            for path in self.v1.values():
                fds.append(os.open(f"{path}/{V1_ENTRY}", os.O_WRONLY | os.O_CLOEXEC))
                undo.callback(os.close, fds[-1])
            undo.pop_all()
            return fds

    def kill_exec(self, number: int) -> None:
        """SIGKILL all that one exec has started; nothing if it is gone.

        From outside the sandbox: PID 1 is in the same cgroups as what it would have to kill, and a
        sandbox that has used up its memory and its CPU keeps it from doing so for half a minute.
        """
        if number > 0 and self.v2 is not None:
            with suppress(OSError):
                cgroup.kill(self.v2 / f"e{number}")

    def oom_kills(self) -> int:
        if self.watched is not None:
            return self.watched.oom_kills
        if self.oom_kill_path is None:
            return 0
        return cgroup.read_keyed(Path(self.oom_kill_path)).get("oom_kill", 0)

    def remove(self, deadline: float) -> None:
        """Remove the directories of a sandbox whose processes are dead. OSError if one stays."""
        if self.watched is not None:
            self.watched.close()
        for path in (*self.v1.values(), self.v2):
            if path is not None:
                cgroup.remove_tree(path, deadline)


def make(node: NodeCgroups, name: str) -> SandboxCgroups:
    """Make a sandbox's cgroups, without limits; nothing is left if a step fails."""
    watched = Watched(pid1_counts=node.one_id) if node.watched else None
    if node.v2 is None:
        return SandboxCgroups(node, None, {}, watched=watched)
    made = SandboxCgroups(node, node.v2 / name, {}, watched=watched)
    try:
        os.mkdir(node.v2 / name)
        for controller, parent in node.v1.items():
            path = parent / name
            os.mkdir(path)
            made.v1[controller] = path
    except OSError:
        with suppress(OSError):
            made.remove(time.monotonic())
        raise
    return made
