"""The text of each view, from a sandbox's limits and figures; formats as in proc(5).

**Memory.** ``MemTotal`` is ``memory_mb``. Pages of the writable layer are memory of the same cgroup
(``model.Limits``), but they are the sandbox's disk: of its tmpfs pages as many as ``disk_mb`` could
hold are left out of every figure, and only what is above that counts as ``Shmem``.

**Time.** ``uptime`` begins with the sandbox, and ``btime`` of ``stat`` is that moment. Start times
in /proc/PID/stat still count from the host's start, so ``ps`` cannot tell how long a process runs.

**Load.** The kernel's is a count of runnable tasks, which nobody counts by cgroup. Here it is the
CPU time used per second, averaged over the last 1, 5 and 15 minutes from one reading to the next:
2.00 is two CPUs at work, and tasks that wait for their turn are not in it.

**CPUs.** The run time of a sandbox is divided evenly among its CPUs; the rest is idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sandboxd.cpu_list import cpu_list
from sandboxd.views.figures import Cpu, Memory
from sandboxd.views.scope import Scope
from sandboxd.views.tree import Node

USER_HZ: Final = 100
"""The unit of times in /proc/stat, on every architecture that sandboxd runs on."""

LOAD_SPANS_S: Final = (60, 300, 900)

SWAPS: Final = b"Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


def meminfo(scope: Scope, memory: Memory) -> bytes:
    total = scope.memory_kb
    on_disk = min(memory.shmem, scope.disk_kb)
    shmem = memory.shmem - on_disk
    free = min(total, max(0, total - (memory.usage - on_disk)))
    # What a sandbox did not put on its disk it may use as memory: use can be above the total.
    cached = min(memory.file + shmem, total - free)
    reclaimable = memory.active_file + memory.inactive_file + memory.slab_reclaimable
    inactive_anon = max(0, memory.inactive_anon - on_disk)
    active_anon = max(0, memory.active_anon - max(0, on_disk - memory.inactive_anon))
    lines = (
        ("MemTotal", total),
        ("MemFree", free),
        ("MemAvailable", min(total, free + reclaimable)),
        ("Buffers", 0),
        ("Cached", cached),
        ("SwapCached", 0),
        ("Active", active_anon + memory.active_file),
        ("Inactive", inactive_anon + memory.inactive_file),
        ("Active(anon)", active_anon),
        ("Inactive(anon)", inactive_anon),
        ("Active(file)", memory.active_file),
        ("Inactive(file)", memory.inactive_file),
        ("Unevictable", memory.unevictable),
        ("Mlocked", 0),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("Dirty", memory.dirty),
        ("Writeback", memory.writeback),
        ("AnonPages", memory.anon),
        ("Mapped", memory.mapped),
        ("Shmem", shmem),
        ("KReclaimable", memory.slab_reclaimable),
        ("Slab", memory.slab_reclaimable + memory.slab_unreclaimable),
        ("SReclaimable", memory.slab_reclaimable),
        ("SUnreclaim", memory.slab_unreclaimable),
        ("KernelStack", memory.kernel_stack),
        ("PageTables", memory.page_tables),
        ("CommitLimit", total),
        ("Committed_AS", memory.anon + shmem),
    )
    return "".join(f"{name + ':':<16}{kb:>8} kB\n" for name, kb in lines).encode()


@dataclass(slots=True)
class Clock:
    """Times of a sandbox from one reading to the next: they only ever grow."""

    idle: int = 0
    """Ticks of all its CPUs together."""
    load: list[float] = field(default_factory=lambda: [0.0] * len(LOAD_SPANS_S))
    load_at_s: float | None = None
    load_usec: int = 0

    def idle_ticks(self, scope: Scope, used: Cpu, now_s: float) -> int:
        whole = int((now_s - scope.started_s) * USER_HZ) * len(scope.cpus)
        self.idle = max(self.idle, whole - _ticks(used.user) - _ticks(used.system))
        return self.idle

    def loads(self, scope: Scope, used: Cpu, now_s: float) -> list[float]:
        since = scope.started_s if self.load_at_s is None else self.load_at_s
        usec = used.user + used.system
        if now_s > since:
            rate = max(0, usec - self.load_usec) / 1e6 / (now_s - since)
            for i, span in enumerate(LOAD_SPANS_S):
                kept = math.exp((since - now_s) / span)
                self.load[i] = self.load[i] * kept + rate * (1 - kept)
            self.load_at_s, self.load_usec = now_s, usec
        return self.load


def stat(scope: Scope, clock: Clock, used: Cpu, processes: int, now_s: float) -> bytes:
    count = len(scope.cpus)
    idle = clock.idle_ticks(scope, used, now_s)
    user, system = _ticks(used.user), _ticks(used.system)
    lines = [f"cpu  {user} 0 {system} {idle} 0 0 0 0 0 0"]
    for i, cpu in enumerate(sorted(scope.cpus)):
        # The first ones get the remainder, so that the sum is the line above.
        part = [(ticks + count - 1 - i) // count for ticks in (user, system, idle)]
        lines.append(f"cpu{cpu} {part[0]} 0 {part[1]} {part[2]} 0 0 0 0 0 0")
    lines += [
        "intr 0",
        "ctxt 0",
        f"btime {int(scope.started_at)}",
        f"processes {processes}",
        "procs_running 1",  # who reads it
        "procs_blocked 0",
        "softirq 0 0 0 0 0 0 0 0 0 0 0",
    ]
    return ("\n".join(lines) + "\n").encode()


def loadavg(scope: Scope, clock: Clock, used: Cpu, processes: int, now_s: float) -> bytes:
    one, five, fifteen = clock.loads(scope, used, now_s)
    return f"{one:.2f} {five:.2f} {fifteen:.2f} 1/{max(1, processes)} 0\n".encode()


def uptime(scope: Scope, clock: Clock, used: Cpu, now_s: float) -> bytes:
    idle = clock.idle_ticks(scope, used, now_s) / USER_HZ
    return f"{max(0.0, now_s - scope.started_s):.2f} {idle:.2f}\n".encode()


def cpuinfo(scope: Scope, host: bytes) -> bytes:
    """The host's blocks of these CPUs, each a core of one package."""
    wanted = {b"%d" % cpu for cpu in scope.cpus}
    kept = []
    for block in host.split(b"\n\n"):
        number = _cpu_of(block)
        if number in wanted:
            kept.append(
                b"\n".join(_alone(line, number, len(wanted)) for line in block.split(b"\n"))
            )
        elif number is None and block.strip():
            kept.append(block.rstrip(b"\n"))  # the board, on Arm
    return b"\n\n".join(kept) + b"\n\n"


def _cpu_of(block: bytes) -> bytes | None:
    for line in block.split(b"\n"):
        key, colon, value = line.partition(b":")
        if colon and key.strip() == b"processor":
            return value.strip()
    return None


def _alone(line: bytes, cpu: bytes, count: int) -> bytes:
    key, _, _ = line.partition(b":")
    values = {
        b"physical id": b"0",
        b"siblings": b"%d" % count,
        b"core id": cpu,
        b"cpu cores": b"%d" % count,
    }
    value = values.get(key.strip())
    return line if value is None else key + b": " + value


def cpu_file(node: Node, cpus: Sequence[int]) -> bytes:
    """A file below /sys/devices/system/cpu."""
    own = (node.cpu,)
    texts = {
        "online": cpu_list(cpus),
        "possible": cpu_list(cpus),
        "present": cpu_list(cpus),
        "kernel_max": str(max(cpus)),
        "offline": "",
        "isolated": "",
        "core_id": str(node.cpu),
        "physical_package_id": "0",
    }
    text = texts.get(node.name)
    if text is None:
        shown = own if node.name.startswith(("core_cpus", "thread_siblings")) else cpus
        text = cpu_list(shown) if node.name.endswith("_list") else cpu_mask(shown)
    return f"{text}\n".encode()


def cpu_mask(cpus: Sequence[int]) -> str:
    """As the kernel writes a mask of CPUs: 32 bits a group, the highest first."""
    bits = sum(1 << cpu for cpu in cpus)
    groups: list[int] = []
    while bits or not groups:
        groups.append(bits & 0xFFFF_FFFF)
        bits >>= 32
    first, *rest = reversed(groups)
    return ",".join([f"{first:x}", *(f"{group:08x}" for group in rest)])


def _ticks(usec: int) -> int:
    return usec * USER_HZ // 1_000_000
