"""Small readers of /proc, proc(5).

Every reader takes a pid and raises ``FileNotFoundError`` or ``ProcessLookupError`` when the process
is gone; only one that is our own unreaped child, or is held by a pidfd, keeps its number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Pid = int | Literal["self"]


@dataclass(frozen=True, slots=True)
class Ids:
    """Real, effective, saved and file-system ids, and the supplementary groups."""

    uids: tuple[int, int, int, int]
    gids: tuple[int, int, int, int]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stat:
    """What is used of /proc/PID/stat."""

    pid: int
    name: str
    state: str
    parent_pid: int
    start_ticks: int
    """Since boot; together with the pid it names a process for good."""


def status(pid: Pid = "self") -> dict[str, str]:
    """/proc/PID/status as it stands, one entry a line."""
    text = _text(pid, "status")
    return {
        key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())
    }


def smaps_rollup(pid: Pid = "self") -> dict[str, str]:
    """/proc/PID/smaps_rollup: sums over all mappings, by name (``Pss_Anon``: ``12 kB``). Costs what
    a walk through all its page tables does."""
    lines = (line.partition(":") for line in _text(pid, "smaps_rollup").splitlines()[1:])
    return {key: value.strip() for key, _, value in lines}


def ids_of(pid: Pid = "self") -> Ids:
    """The ids of a process, as the reader's own user namespace names them."""
    fields = status(pid)
    uids, gids = (tuple(int(n) for n in fields[key].split()) for key in ("Uid", "Gid"))
    return Ids(
        (uids[0], uids[1], uids[2], uids[3]),
        (gids[0], gids[1], gids[2], gids[3]),
        tuple(int(n) for n in fields["Groups"].split()),
    )


def capabilities_of(pid: Pid = "self") -> dict[str, int]:
    """CapInh, CapPrm, CapEff, CapBnd and CapAmb as bit masks."""
    return {key: int(value, 16) for key, value in status(pid).items() if key.startswith("Cap")}


def stat(pid: Pid = "self") -> Stat:
    text = _text(pid, "stat")
    # The name stands in parentheses and may itself contain some.
    opening, closing = text.index("("), text.rindex(")")
    rest = text[closing + 2 :].split()
    return Stat(
        int(text[:opening]), text[opening + 1 : closing], rest[0], int(rest[1]), int(rest[19])
    )


def children(pid: Pid = "self") -> list[int]:
    """Children of all threads of a process (needs CONFIG_PROC_CHILDREN).

    Exact only while they do not change: /proc/PID/task/TID/children may pass one over.
    """
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found.extend(int(number) for number in _text(pid, f"task/{task}/children").split())
    return found


def pids() -> list[int]:
    """Every process that this /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def resource_limits(pid: Pid = "self") -> dict[str, tuple[int | None, int | None]]:
    """/proc/PID/limits: (soft, hard) by the name it has there; None is unlimited."""
    limits = {}
    for line in _text(pid, "limits").splitlines()[1:]:
        name, rest = line[:25].strip(), line[25:].split()
        soft, hard = (None if word == "unlimited" else int(word) for word in rest[:2])
        limits[name] = (soft, hard)
    return limits


def sysctl(name: str) -> str | None:
    """The value of a sysctl by its dotted name, or None where this kernel has none such."""
    try:
        return Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None


def _text(pid: Pid, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="surrogateescape")
