"""What a node has room for, and what of it is taken: the ledger that admission goes by.

Counted is what was promised (limits), not what is used at the moment: a sandbox that fills its disk
an hour after it was made must not take the node down then. As most never come near their limits,
more is promised than there is, by a factor for each resource; ``pressure`` closes the node should
many of them come near at once.

===========  =====================================  ===========================================
resource     a sandbox counts                       the node has
===========  =====================================  ===========================================
sandboxes    1                                      ``max_sandboxes``
memory_mb    ``memory_mb + disk_mb`` + OVERHEAD_MB  (memory - ``memory_reserve_mb``) * factor
cpus         ``cpus``                               CPUs * factor
pids         ``pids`` + 1 (its PID 1)               (pid_max or threads-max - reserve) * factor
fds          DAEMON_FDS                             RLIMIT_NOFILE less reserve and connections
===========  =====================================  ===========================================

Memory is what the node's own cgroups leave of it, where a job's limit is below the machine's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from sandboxd.config import Config
from sandboxd.linux import cgroup, pressure
from sandboxd.model import Limits

OVERHEAD_MB: Final = 2
"""Of a sandbox that does nothing: 0.4 MiB of kernel and PID 1, and its part of the launcher and the
daemon, rounded up."""
PIDS_RESERVE: Final = 1024
"""For the host and the daemon's own."""
DAEMON_FDS: Final = 16
"""Control socket, OOM counter, two pipes for each of a few images, and some commands' pipes."""
FDS_RESERVE: Final = 512


@dataclass(frozen=True, slots=True)
class Amounts:
    """So much of everything that is counted."""

    sandboxes: int = 0
    memory_mb: float = 0.0
    cpus: float = 0.0
    pids: float = 0.0
    fds: int = 0

    def plus(self, other: Amounts, sign: int = 1) -> Amounts:
        return Amounts(
            self.sandboxes + sign * other.sandboxes,
            self.memory_mb + sign * other.memory_mb,
            # Sums of tenths drift; what is back at nothing shall read so.
            round(self.cpus + sign * other.cpus, 6),
            self.pids + sign * other.pids,
            self.fds + sign * other.fds,
        )

    def short_of(self, room: Amounts) -> str | None:
        """The first resource of which ``room`` has less than this; None if it has enough."""
        for name in self.__slots__:
            if getattr(self, name) > getattr(room, name):
                return name
        return None

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def demand(limits: Limits) -> Amounts:
    """What one sandbox counts."""
    return Amounts(
        sandboxes=1,
        memory_mb=limits.memory_mb + limits.disk_mb + OVERHEAD_MB,
        cpus=limits.cpus,
        pids=limits.pids + 1,
        fds=DAEMON_FDS,
    )


def node_capacity(config: Config, nofile: int) -> Amounts:
    """What there is here. ``nofile``: this process's soft RLIMIT_NOFILE."""
    total_mb, _ = pressure.memory_mb()
    bound = pressure.cgroup_memory_mb(cgroup.layout())
    if bound is not None:
        total_mb = min(total_mb, bound[0])
    memory_mb = max(0, total_mb - config.memory_reserve_mb)
    pids = max(0, pressure.pids_most() - PIDS_RESERVE)
    return Amounts(
        sandboxes=config.max_sandboxes,
        memory_mb=float(int(memory_mb * config.memory_overcommit)),
        cpus=pressure.cpus_usable() * config.cpu_overcommit,
        pids=float(int(pids * config.pids_overcommit)),
        fds=max(0, nofile - FDS_RESERVE - most_connections(config, nofile)),
    )


def most_connections(config: Config, nofile: int) -> int:
    """Connections that may be open at once: never more than half of all descriptors."""
    return min(config.max_connections, nofile // 2)


class Ledger:
    """What is taken, by whom. Taking twice under one id counts once, giving back what was never
    taken nothing."""

    def __init__(self, capacity: Amounts) -> None:
        self.capacity = capacity
        self.used = Amounts()
        self._taken: dict[str, tuple[str, Amounts]] = {}
        self._of_run: dict[str, int] = {}

    def short(self, wanted: Amounts) -> str | None:
        """The resource of which there is too little now; None if there is enough of all."""
        return self.used.plus(wanted).short_of(self.capacity)

    def take(self, sandbox_id: str, run: str, amounts: Amounts) -> None:
        """Whether it fits or not: one that lives already is counted as it is."""
        if sandbox_id in self._taken:
            return
        self._taken[sandbox_id] = (run, amounts)
        self.used = self.used.plus(amounts)
        self._of_run[run] = self._of_run.get(run, 0) + 1

    def give(self, sandbox_id: str) -> str | None:
        """Give back; whose run it was, None if it had nothing."""
        found = self._taken.pop(sandbox_id, None)
        if found is None:
            return None
        run, amounts = found
        self.used = self.used.plus(amounts, -1)
        left = self._of_run[run] - 1
        if left:
            self._of_run[run] = left
        else:
            del self._of_run[run]
        return run

    def of_run(self, run: str) -> int:
        return self._of_run.get(run, 0)
