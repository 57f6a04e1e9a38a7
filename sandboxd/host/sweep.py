"""Finding and removing what this instance has left on the host and no node owns: after a crash of
everything at once, or after one that moved (another slice, another Slurm step).

An instance is a runtime directory. What counts as its own, and why nothing of another's does:

============  ======================================================================================
cgroups       directories with the node's name, which carries a hash of the runtime directory,
              anywhere in the hierarchies; those of the node that lives are left out, and those in
              which another instance's lives (a container's, with a runtime directory of that path)
processes     what is in such a cgroup; signalled through it, or by a pidfd after a second look
FUSE          connections whose mount lies below ``mnt`` of the runtime directory, seen from one of
              those processes; aborted first, as who waits for a dead server cannot be killed
mounts        below ``mnt`` of the runtime directory, with the sources that a node gives them
network       the node's nftables table and link, by their names, in the network namespace that this
              is called in, while no node lives; every other namespace ends with its processes
files         the node's socket and ``mnt``, while no node lives; a token half made by a process
              that is gone
============  ======================================================================================

Looking changes nothing. Removing is idempotent, and what fails is told and tried again next time.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.config import Config
from sandboxd.errors import NodeUnavailable
from sandboxd.host import node_lock
from sandboxd.host.cgroups import living_directories
from sandboxd.host.command import cgroup_name
from sandboxd.host.delegation import remove_delegated
from sandboxd.linux import cgroup, mount, pidfd, procfs
from sandboxd.linux.cgroup import CgroupLayout
from sandboxd.network import uplink

DEPTH_MAX: Final = 12
"""Of a hierarchy; a service of a user's session is at six or seven."""
KILL_S: Final = 10.0
MOUNT_SOURCES: Final = frozenset({"images", "image"})
"""What the launcher gives its tmpfs and its FUSE mounts as their source."""
FUSE_CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
_FORMING: Final = re.compile(r"\.(\d+)\.[0-9a-f]{8}$")


@dataclass(frozen=True, slots=True)
class Instance:
    """Whose leftovers. ``alive``: the cgroups of the node that lives now, none if none does."""

    runtime_dir: str
    token_file: str
    cgroup_name: str
    alive: frozenset[Path] = frozenset()
    node_lives: bool = False

    @property
    def mount_dir(self) -> str:
        return f"{os.path.realpath(self.runtime_dir)}/mnt"


@dataclass(frozen=True, slots=True)
class Leftover:
    kind: str
    """``fuse``, ``cgroup``, ``mount``, ``link``, ``nft`` or ``file``: the order in which they are
    removed."""
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" ({self.detail})" if self.detail else "")


@contextmanager
def instance(config: Config) -> Iterator[Instance]:
    """That of a configuration. None starts while this lasts; one that lives is left alone.

    Raises NodeUnavailable where one is just starting or ending.
    """
    name = cgroup_name(config)
    with ExitStack() as stack:
        alive: frozenset[Path] = frozenset()
        lives = False
        with suppress(FileNotFoundError):  # then there never was a node, or a reboot since
            lock = node_lock.claim_if_free(config.runtime_dir)
            lives = lock is None
            if lock is not None:
                stack.callback(os.close, lock)
        if lives:
            alive = living_directories(_hostd(config.launcher_socket), name)
        yield Instance(config.runtime_dir, config.token_file, name, alive, lives)


def _hostd(path: str) -> int:
    """Who listens at the node's socket: SO_PEERCRED of a Unix socket, unix(7)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(path)
        except OSError as error:
            raise NodeUnavailable(
                "a node is starting or ending in the runtime directory", hint="try again"
            ) from error
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("=iII", credentials)
        return int(pid)


def find(instance: Instance, layout: CgroupLayout | None = None) -> list[Leftover]:
    """All there is, in the order in which it is to be removed."""
    layout = layout or cgroup.layout()
    groups = list(_cgroups(instance, layout))
    pids = sorted({pid for path in groups for pid in _processes(path)})
    return [
        *_fuse_connections(instance, pids),
        *(Leftover("cgroup", str(path), _who(path)) for path in groups),
        *_mounts(instance),
        *_network(instance),
        *_files(instance),
    ]


def remove(instance: Instance, leftover: Leftover) -> None:
    """Remove one. Raises OSError where it cannot be."""
    name = leftover.name
    if leftover.kind == "fuse":
        with suppress(FileNotFoundError):
            (FUSE_CONNECTIONS / name / "abort").write_text("1", encoding="ascii")
    elif leftover.kind == "cgroup":
        _remove_cgroup(Path(name))
    elif leftover.kind == "mount":
        mount.umount2(name, mount.MNT_DETACH)
    elif leftover.kind == "link":
        uplink.remove_link(uplink.instance_of(instance.cgroup_name))
    elif leftover.kind == "nft":
        uplink.remove_table(uplink.instance_of(instance.cgroup_name))
    elif os.path.isdir(name):
        os.rmdir(name)
    else:
        with suppress(FileNotFoundError):
            os.unlink(name)


def sweep(instance: Instance) -> list[tuple[Leftover, str | None]]:
    """Find and remove; each with why it could not be, where it could not."""
    done: list[tuple[Leftover, str | None]] = []
    for leftover in find(instance):
        try:
            remove(instance, leftover)
        except OSError as error:
            done.append((leftover, error.strerror or str(error)))
        else:
            done.append((leftover, None))
    return done


# --- cgroups and what is in them -----------------------------------------------------------------


def _cgroups(instance: Instance, layout: CgroupLayout) -> Iterator[Path]:
    seen: set[Path] = set()
    for root in (layout.v2_mount, *layout.v1.values()):
        if root is None or root in seen:
            continue
        seen.add(root)
        yield from _named(root, instance.cgroup_name, instance.alive, DEPTH_MAX)


def _named(path: Path, name: str, alive: frozenset[Path], depth: int) -> Iterator[Path]:
    try:
        entries = [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return  # removed meanwhile
    for entry in entries:
        found = Path(entry.path)
        if entry.name == name:
            if found not in alive and not _another_s(found):
                yield found
        elif depth > 1:
            yield from _named(found, name, alive, depth - 1)


def _another_s(path: Path) -> bool:
    """Whether a node lives there that only has our name: one in a container with a runtime
    directory of the same path, whose cgroups are in sight.

    Ours cannot live, as its lock is ours; and its launcher ends with the hostd that started it. So
    what descends from a living hostd is another's, and so is a process of a pid namespace that we
    cannot look into (0).
    """
    for group in cgroup.subtree(path):
        with suppress(OSError):
            if any(pid == 0 or _has_hostd(pid) for pid in cgroup.processes(group)):
                return True
    return False


def _has_hostd(pid: int) -> bool:
    """Whether an ancestor is a hostd."""
    with suppress(OSError):
        while (pid := procfs.stat(pid).parent_pid) > 1:
            if b"sandboxd.host" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return True
    return False


def _processes(path: Path) -> Iterator[int]:
    for group in cgroup.subtree(path):
        with suppress(OSError):
            yield from (pid for pid in cgroup.processes(group) if pid > 0)


def _who(path: Path) -> str:
    names = []
    for pid in _processes(path):
        with suppress(OSError):
            names.append(f"{procfs.stat(pid).name}[{pid}]")
    if not names:
        return ""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _remove_cgroup(path: Path) -> None:
    if os.geteuid() != 0:
        remove_delegated(path)
        return
    deadline = time.monotonic() + KILL_S
    try:
        cgroup.kill(path)
    except FileNotFoundError:  # a v1 hierarchy, or a kernel before 5.14
        while (pids := list(_processes(path))) and time.monotonic() < deadline:
            for pid in pids:
                _kill(path, pid, deadline)
    cgroup.remove_tree(path, deadline)


def _kill(path: Path, pid: int, deadline: float) -> None:
    """SIGKILL a member of a cgroup and wait for its end. The pidfd comes first, then the second
    look: a number that was given away meanwhile is not in the cgroup."""
    fd = pidfd.open_living(pid)
    if fd is None:
        return
    try:
        if pid in _processes(path):
            pidfd.pidfd_send_signal(fd, signal.SIGKILL)
            pidfd.wait_ended(fd, max(0.0, min(1.0, deadline - time.monotonic())))
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


# --- mounts --------------------------------------------------------------------------------------


def _fuse_connections(instance: Instance, pids: list[int]) -> Iterator[Leftover]:
    """The connection's name is the minor number of its mount's device."""
    below = instance.mount_dir + "/"
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="replace")
            for one in mount.parse_mountinfo(text):
                if one.fstype.startswith("fuse") and one.mountpoint.startswith(below):
                    found.add(one.device.partition(":")[2])
    for minor in sorted(found):
        if (FUSE_CONNECTIONS / minor).is_dir():
            yield Leftover("fuse", minor, "an image of a node that is gone")


def _mounts(instance: Instance) -> Iterator[Leftover]:
    """In the host's own mount namespace, where a node makes none: the innermost first."""
    directory = instance.mount_dir
    for one in reversed(mount.mountinfo()):
        inside = one.mountpoint == directory or one.mountpoint.startswith(directory + "/")
        if inside and one.source in MOUNT_SOURCES:
            yield Leftover("mount", one.mountpoint, one.fstype)


# --- network -------------------------------------------------------------------------------------


def _network(instance: Instance) -> Iterator[Leftover]:
    if instance.node_lives:
        return
    name = uplink.instance_of(instance.cgroup_name)
    if uplink.has_link(name):
        yield Leftover("link", uplink.link_name(name), "of a router that is gone")
    if uplink.has_table(name):
        yield Leftover("nft", uplink.table_name(name), "of a router that is gone")


# --- files ---------------------------------------------------------------------------------------


def _files(instance: Instance) -> Iterator[Leftover]:
    if not instance.node_lives:
        for name, detail in (("launcher.sock", "nobody listens"), ("mnt", "")):
            path = os.path.join(instance.runtime_dir, name)
            if os.path.lexists(path):
                yield Leftover("file", path, detail)
    directory, name = os.path.split(instance.token_file)
    with suppress(OSError):
        for entry in sorted(os.listdir(directory)):
            forming = _FORMING.search(entry)
            if forming is None or entry[: forming.start()] != name:
                continue
            path = os.path.join(directory, entry)
            if not _made_it(int(forming[1]), path):
                yield Leftover("file", path, "its maker is gone")


def _made_it(pid: int, path: str) -> bool:
    """Whether a process of this number lives that is not younger than the file."""
    try:
        start_s = procfs.stat(pid).start_ticks / os.sysconf("SC_CLK_TCK")
        made_s = os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return False
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + start_s <= made_s + 1
