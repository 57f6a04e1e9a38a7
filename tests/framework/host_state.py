"""Takes a picture of everything on the host that a sandbox could leave behind.

For: `leaks`, which compares two pictures. Not for: judging; here nothing is right or wrong.

Each thing is a `Thing`: a `key` that tells it from every other thing of its category, and a `kind`
under which things are interchangeable. A running daemon replaces its workers all the time (a spare
sandbox used up, another one made), so for what belongs to it only a *growing number* of a kind is
a leak; see `leaks.compare`.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Programs of ours; what runs under these names belongs to some test even when it was orphaned.
OUR_PROGRAMS = ("sandbox_init", "squashfuse", "sandboxd", "sandboxd-")
NAMESPACES = ("net", "mnt", "pid", "user", "ipc", "uts", "cgroup")
# Begins the name of every directory and cgroup that this test run makes on the host.
OWN_PREFIX = f"sandboxd-test-{os.getpid()}-"
TEMPORARY_DIR = Path("/tmp")
# Entries of /tmp that come and go with the tools around the tests rather than with the tests.
_FOREIGN_TEMPORARY = re.compile(r"^(pytest-of-|\.|bash_|tmux-|systemd-private-|hsperfdata_)")
_ID = re.compile(r"[0-9a-f]{8,}|[0-9]+")


@dataclass(frozen=True, order=True)
class Thing:
    """One mount, process, file … `kind` defaults to the key: replaced by nothing else."""

    key: str
    kind: str = ""

    def shape(self) -> str:
        return self.kind or self.key


@dataclass(frozen=True)
class Scope:
    """What to look at.

    `directories`: every file below them counts. `id_ranges`: (first, count) of host uids that only
    sandboxes use. `daemon_pids`: long-lived processes of ours that may replace their children.
    `shared_host`: other people work on this machine; count only what is certainly ours.
    """

    directories: tuple[Path, ...] = ()
    id_ranges: tuple[tuple[int, int], ...] = ()
    daemon_pids: frozenset[int] = frozenset()
    shared_host: bool = False


@dataclass
class Process:
    pid: int
    parent: int
    name: str
    started: int
    state: str
    uid: int
    children: list[Process] = field(default_factory=list)

    def descendants(self) -> Iterator[Process]:
        for child in self.children:
            yield child
            yield from child.descendants()


Picture = dict[str, frozenset[Thing]]


def take(scope: Scope, categories: frozenset[str] | None = None) -> Picture:
    """The state of `categories` (default: all) now."""
    table = process_table()
    ours = our_processes(table, scope)
    collectors: dict[str, Callable[[], Iterator[Thing]]] = {
        "processes": lambda: _processes(table, ours, scope),
        "namespaces": lambda: _namespaces(ours if scope.shared_host else table),
        "mounts": lambda: _mounts(scope),
        "cgroups": lambda: _cgroups(scope),
        "fds": lambda: _fds(table, scope),
        "files": lambda: _files(scope),
        "loop devices": lambda: _loop_devices(scope),
        "FUSE connections": lambda: _fuse_connections(scope),
        "nft tables": lambda: _nft_tables(scope),
        "links": lambda: _links(scope),
        "routes": lambda: _routes(scope),
    }
    return {
        name: frozenset(collect())
        for name, collect in collectors.items()
        if categories is None or name in categories
    }


# Processes


def process_table() -> dict[int, Process]:
    table: dict[int, Process] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text(errors="replace")
            uid = entry.stat().st_uid
        except (FileNotFoundError, ProcessLookupError):
            continue
        # proc_pid_stat(5): the name stands in parentheses and may itself contain some.
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        rest = stat[stat.rindex(")") + 2 :].split()
        table[int(entry.name)] = Process(
            int(entry.name), int(rest[1]), name, int(rest[19]), rest[0], uid
        )
    for process in table.values():
        if parent := table.get(process.parent):
            parent.children.append(process)
    return table


def our_processes(table: dict[int, Process], scope: Scope) -> dict[int, Process]:
    """Descendants of this process, and what a name or an id gives away as a sandbox's.

    The framework makes the test process a subreaper, so an orphan of a test stays a descendant.
    """
    ours = {process.pid: process for process in table[os.getpid()].descendants()}
    if not scope.shared_host:
        for process in table.values():
            by_id = any(first <= process.uid < first + n for first, n in scope.id_ranges)
            if by_id or process.name.startswith(OUR_PROGRAMS):
                ours[process.pid] = process
    return ours


def _daemon_family(table: dict[int, Process], scope: Scope) -> set[int]:
    return {
        process.pid
        for pid in scope.daemon_pids
        if pid in table
        for process in table[pid].descendants()
    }


def _processes(
    table: dict[int, Process], ours: dict[int, Process], scope: Scope
) -> Iterator[Thing]:
    family = _daemon_family(table, scope)
    for process in ours.values():
        zombie = " (zombie)" if process.state == "Z" else ""
        replaceable = f"{process.name}{zombie} of the daemon" if process.pid in family else ""
        yield Thing(
            f"{process.name}{zombie} pid {process.pid} uid {process.uid} "
            f"parent {process.parent} started {process.started}",
            replaceable,
        )


def _namespaces(table: dict[int, Process]) -> Iterator[Thing]:
    """Every namespace a process lives in or holds by an fd.

    One that is kept only by a bind mount shows among the mounts (fs type nsfs).
    """
    links = [f"/proc/{pid}/ns/{name}" for pid in table for name in NAMESPACES]
    for pid in table:
        try:
            links += [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
        except OSError:  # it ended, or is a zombie
            continue
    seen: set[str] = set()
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        kind, bracket, _ = target.partition(":[")
        if bracket and kind in NAMESPACES:
            seen.add(target)
    for target in seen:
        yield Thing(target, f"{target.partition(':')[0]} namespace")


# File systems


def _mounts(scope: Scope) -> Iterator[Thing]:
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, root, mountpoint, *_ = before.split(" ")
        kind, source, *_ = after.split(" ")
        if scope.shared_host and not _is_below(mountpoint, scope):
            continue
        from_root = "" if root == "/" else f" of {root}"
        yield Thing(f"{kind} on {mountpoint}, source {source}{from_root}")


def _is_below(path: str, scope: Scope) -> bool:
    return any(Path(path).is_relative_to(directory) for directory in scope.directories)


def cgroup_mounts() -> list[Path]:
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        if after.split(" ")[0] in ("cgroup", "cgroup2"):
            found.append(Path(before.split(" ")[4]))
    return found


def _cgroups(scope: Scope) -> Iterator[Thing]:
    for mount in cgroup_mounts():
        for directory, names, _ in os.walk(mount):
            for name in names:
                path = os.path.join(directory, name)
                if scope.shared_host and OWN_PREFIX not in path:
                    continue
                yield Thing(path, _ID.sub("#", path) if scope.daemon_pids else "")


def _files(scope: Scope) -> Iterator[Thing]:
    for directory in scope.directories:
        for parent, directories, files in os.walk(directory):
            for name in (*directories, *files):
                path = os.path.join(parent, name)
                yield Thing(path, _ID.sub("#", path) if scope.daemon_pids else "")
    if scope.shared_host:
        return
    for place in (TEMPORARY_DIR, Path("/dev/shm"), Path("/run")):
        for entry in os.scandir(place):
            if not _FOREIGN_TEMPORARY.match(entry.name):
                yield Thing(entry.path)


def _loop_devices(scope: Scope) -> Iterator[Thing]:
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = backing.read_text(errors="replace").strip()
        except OSError:  # detached while we looked
            continue
        if not scope.shared_host or _is_below(name, scope):
            yield Thing(f"/dev/{backing.parts[3]} of {name}")


def _fuse_connections(scope: Scope) -> Iterator[Thing]:
    """Every FUSE superblock, in whatever mount namespace, dead servers included."""
    if scope.shared_host:
        return
    for number in _fusectl_entries():
        yield Thing(f"connection {number}", "connection" if scope.daemon_pids else "")


def _fusectl_entries() -> list[str]:
    visible = Path("/sys/fs/fuse/connections")
    if os.path.ismount(visible):
        return os.listdir(visible)
    # Not mounted here: look into a mount that is attached to nowhere (fsopen(2), fsmount(2)).
    libc = ctypes.CDLL(None, use_errno=True)
    sys_fsopen, sys_fsconfig, sys_fsmount, cmd_create, cloexec = 430, 431, 432, 6, 1
    context = libc.syscall(sys_fsopen, b"fusectl", cloexec)
    if context < 0:
        return []
    try:
        if libc.syscall(sys_fsconfig, context, cmd_create, None, None, 0) < 0:
            return []
        root = libc.syscall(sys_fsmount, context, cloexec, 0)
        if root < 0:
            return []
        try:
            # fsmount(2) gives an O_PATH descriptor, which cannot be read itself.
            directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
        finally:
            os.close(root)
        try:
            return os.listdir(directory)
        finally:
            os.close(directory)
    finally:
        os.close(context)


# Descriptors and network


def _fds(table: dict[int, Process], scope: Scope) -> Iterator[Thing]:
    """Open files of the test process and of the daemon's own processes.

    By number and sort, not by inode: a client that reconnects has as many sockets as before.
    """
    watched = {os.getpid(): "tests"}
    watched |= {pid: table[pid].name for pid in scope.daemon_pids if pid in table}
    for pid, name in watched.items():
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for number in numbers:
            # pytest itself swaps its standard streams while it captures.
            if name == "tests" and int(number) < 3:
                continue
            try:
                target = os.readlink(f"/proc/{pid}/fd/{number}")
            except OSError:  # closed meanwhile: the one this listing itself used, for instance
                continue
            sort = target.partition(":[")[0]
            yield Thing(
                f"fd {number} of {name} ({pid}): {sort}",
                f"fd of {name} ({pid}): {_ID.sub('#', sort)}",
            )


def _nft_tables(scope: Scope) -> Iterator[Thing]:
    program = None if scope.shared_host else shutil.which("nft")
    if program is None:
        return
    listed = subprocess.run(
        [program, "list", "tables"], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        yield Thing(line)


def _routes(scope: Scope) -> Iterator[Thing]:
    """Of the main table, IPv4: as /proc has them, addresses in hexadecimal."""
    if scope.shared_host:
        return
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        link, destination, gateway, _, _, _, metric, mask, *_ = line.split()
        key = f"{destination}/{mask} via {gateway} dev {link} metric {metric}"
        yield Thing(key, _ID.sub("#", key) if scope.daemon_pids else "")


def _links(scope: Scope) -> Iterator[Thing]:
    if scope.shared_host:
        return
    for name in os.listdir("/sys/class/net"):
        yield Thing(name, _ID.sub("#", name) if scope.daemon_pids else "")
