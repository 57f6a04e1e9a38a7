"""The leak check: what a test made and did not take away, it fails for.

For: `conftest`, which runs it around every kernel, e2e and security test and around the whole run,
and for fixtures that keep something alive on purpose. Not for: looking; that is `host_state`.

A long-lived daemon does not count as a leak of the first test that uses it, because fixtures of a
wider scope are set up before the check takes its *baseline*. What such a fixture keeps alive is
registered with `LeakCheck.long_lived`, and is itself checked by `LeakCheck.around` when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.framework import host_state, times
from tests.framework.host_state import Picture, Scope, Thing

PR_SET_CHILD_SUBREAPER = 36
SETTLE_S = times.scaled(10.0)
RUNTIME_DIRECTORIES = (Path("/run/sandboxd"), Path("/var/lib/sandboxd"))


class Leak(AssertionError):
    """Something was left behind; the message lists it."""


def sandbox_id_ranges(user: str = "sandboxd") -> tuple[tuple[int, int], ...]:
    """The host ids only sandboxes have, from subuid(5)."""
    try:
        lines = Path("/etc/subuid").read_text().splitlines()
    except FileNotFoundError:
        return ()
    entries = [line.split(":") for line in lines]
    return tuple((int(e[1]), int(e[2])) for e in entries if len(e) == 3 and e[0] == user)


def become_subreaper() -> None:
    """Let orphans of a test come to this process instead of to init, where they would be lost."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, *(ctypes.c_ulong(n) for n in (1, 0, 0, 0))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl(PR_SET_CHILD_SUBREAPER)")


def compare(before: Picture, after: Picture, allowed: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """What is in `after` and not in `before`, by category; empty categories are left out.

    Things of one kind replace each other: if 2 new ones appeared and 1 old one is gone, 1 leaked,
    and both new ones are named since nobody can tell which. `allowed`: substrings of keys.
    """
    leaks: dict[str, list[str]] = {}
    for category, things in after.items():
        earlier = before.get(category, frozenset())
        grown = Counter(thing.shape() for thing in things)
        grown.subtract(thing.shape() for thing in earlier)
        for thing in sorted(things - earlier):
            if grown[thing.shape()] > 0 and not any(text in thing.key for text in allowed):
                leaks.setdefault(category, []).append(thing.key)
    return leaks


def report(leaks: dict[str, list[str]], what: str) -> str:
    lines = [f"{what} left behind:"]
    for category, keys in leaks.items():
        lines.append(f"  {category}:")
        lines += [f"    {key}" for key in keys]
    return "\n".join(lines)


@dataclass
class LeakCheck:
    """One per test run; knows what is meant to live longer than a test."""

    shared_host: bool = False
    settle_s: float = SETTLE_S
    daemon_pids: set[int] = field(default_factory=set)
    directories: set[Path] = field(default_factory=lambda: set(RUNTIME_DIRECTORIES))
    _allowed: list[str] = field(default_factory=list)
    _refresh: list[Callable[[], None]] = field(default_factory=list)

    def scope(self) -> Scope:
        return Scope(
            directories=tuple(sorted(self.directories)),
            id_ranges=sandbox_id_ranges(),
            daemon_pids=frozenset(self.daemon_pids),
            shared_host=self.shared_host,
        )

    def allow(self, text: str) -> None:
        """Within the running test, things whose description contains `text` are no leak.

        For a test whose point is that the daemon keeps something, such as an image's mount.
        """
        self._allowed.append(text)

    def forbid_all(self) -> None:
        """Forget what was allowed: the next test starts."""
        self._allowed.clear()

    @contextlib.contextmanager
    def long_lived(
        self,
        pids: set[int],
        directories: set[Path],
        refresh: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """While this lasts, `pids` may replace their children, and `directories` are watched.

        `refresh` is called before every picture, to bring what comes and goes with time (an idle
        connection) into the same state each time.
        """
        new_pids, new_directories = pids - self.daemon_pids, directories - self.directories
        self.daemon_pids |= new_pids
        self.directories |= new_directories
        if refresh:
            self._refresh.append(refresh)
        try:
            yield
        finally:
            if refresh:
                self._refresh.remove(refresh)
            self.daemon_pids -= new_pids
            self.directories -= new_directories

    @contextlib.contextmanager
    def around(self, what: str) -> Iterator[None]:
        """Raise `Leak` if, soon after the block, more is there than before it.

        Not raised over an exception of the block: what failed first is what matters.
        """
        __tracebackhide__ = True
        scope = self.scope()
        before = self._picture(scope)
        yield
        self.settle(before, scope, what)

    def settle(self, before: Picture, scope: Scope, what: str) -> None:
        """Wait until nothing is left that was not in `before`; the kernel tears down behind us.

        Network namespaces, FUSE connections and cgroups end asynchronously and tell nobody: only
        the end of a process is an event one can wait for.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + self.settle_s
        pause_s = 0.005
        categories: frozenset[str] | None = None
        while True:
            after = self._picture(scope, categories)
            leaks = compare(before, after, tuple(self._allowed))
            if not leaks:
                return
            if time.monotonic() > deadline:
                raise Leak(report(leaks, what))
            categories = frozenset(leaks)
            _wait_for_exit(after.get("processes", frozenset()) - before["processes"], pause_s)
            pause_s = min(pause_s * 2, 0.2)

    def _picture(self, scope: Scope, categories: frozenset[str] | None = None) -> Picture:
        for refresh in self._refresh:
            refresh()
        reap_adopted(self.daemon_pids)
        return host_state.take(scope, categories)


def reap_adopted(keep: set[int]) -> None:
    """Collect children that ended and that nobody will wait for; `keep` have someone who will."""
    table = host_state.process_table()
    for child in table[os.getpid()].children:
        if child.state == "Z" and child.pid not in keep:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def _wait_for_exit(processes: frozenset[Thing], timeout_s: float) -> None:
    """Wait until one of `processes` ends, at most `timeout_s`; just that long if there is none."""
    poller = select.poll()
    with contextlib.ExitStack() as stack:
        for thing in processes:
            if "(zombie)" in thing.key:
                continue
            pid = int(thing.key.split(" pid ")[1].split(" ")[0])
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:  # ended; Linux 6.1 has EINVAL too where a group still has its number
                continue
            stack.callback(os.close, pidfd)
            poller.register(pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)
