"""Sysctls and limits of the host that many sandboxes at once need higher than the defaults."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sandboxd.linux import procfs

_NAMESPACES: Final = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """One value of the host, and how much is needed. None: there is no such limit here."""

    name: str
    value: int | None
    needed: int
    remedy: str
    why: str

    @property
    def met(self) -> bool:
        return self.value is None or self.value >= self.needed


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    needed: Callable[[int], int]
    why: str


# What a sandbox takes, with room for its execs. The fixed parts are what the rest of a node uses.
_RULES: Final = (
    *(
        _Rule(f"user.max_{kind}_namespaces", lambda n: 64 + 2 * n, "each sandbox has its own")
        for kind in _NAMESPACES
    ),
    _Rule(
        "fs.inotify.max_user_instances",
        lambda n: 128 + 16 * n,
        "counted for one host user over all sandboxes",
    ),
    _Rule(
        "kernel.pid_max",
        lambda n: 32_768 + 512 * n,
        "a sandbox's default limit is 512 processes, and the node's pids are one range",
    ),
    _Rule(
        "fs.file-max",
        # 512 processes of 16,384 files: a sandbox's default limits. The files are memory that its
        # cgroup pays for, so a number too large to reach, as systemd sets it, does no harm.
        lambda n: 65_536 + 512 * 16_384 * n,
        "open files of the whole host: one sandbox that uses them up stops all that is not root",
    ),
)

PIPE_PAGES: Final = 16
_PIPES: Final = 32
"""Pipes of a sandbox whose execs are running: beyond the soft limit they hold one page each."""

_LAUNCHER_FDS: Final = 64
"""Descriptors the launcher keeps for one sandbox, with its execs'."""


def needs(sandboxes: int) -> Iterator[Need]:
    """Each value of interest, for ``sandboxes`` at once."""
    for rule in _RULES:
        needed = rule.needed(sandboxes)
        yield Need(rule.name, _sysctl(rule.name), needed, _set(rule.name, needed), rule.why)
    yield _pipe_pages(sandboxes)
    yield _open_files(sandboxes)


def _pipe_pages(sandboxes: int) -> Need:
    name = "fs.pipe-user-pages-soft"
    value, needed = _sysctl(name), sandboxes * _PIPES * PIPE_PAGES
    if value == 0:  # no limit
        value = None
    why = "counted for one host user over all sandboxes; beyond it pipes shrink to a page"
    return Need(name, value, needed, _set(name, 0), why)


def _open_files(sandboxes: int) -> Need:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    value = None if hard == resource.RLIM_INFINITY else hard
    needed = 1024 + sandboxes * _LAUNCHER_FDS
    remedy = f"LimitNOFILE={needed} in the service, or ulimit -Hn {needed}"
    return Need("RLIMIT_NOFILE", value, needed, remedy, "the launcher holds every sandbox's files")


def _sysctl(name: str) -> int | None:
    text = procfs.sysctl(name)
    return None if text is None else int(text)


def _set(name: str, value: int) -> str:
    return f"sysctl -w {name}={value}, and the same in /etc/sysctl.d"
