"""Control groups, cgroups(7): where they are, and the life of one.

Both versions, also side by side: a v1 node often has a cgroup2 hierarchy too, without controllers,
which serves to kill and freeze. Limits and usage are in ``cgroup_limits``.

What the kernel does not take at once is told by an event where there is one (``cgroup.events`` of
v2); v1 tells nobody, so there the wait is by short, growing pauses up to the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from sandboxd.linux import _libc
from sandboxd.linux.mount import Mount, mountinfo, parse_mountinfo

FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class CgroupLayout:
    """The hierarchies of this node, and where a process stands in them.

    ``v2_controllers``: those the v2 hierarchy can hand on from its root as mounted here. ``v1``:
    mount point by controller; co-mounted ones (``cpu,cpuacct``) share one. Named hierarchies
    without a controller (``name=systemd``) are left out. ``own``: the directory of the process the
    layout was read for, by controller, and by "" in v2; only where it lies below what is mounted.
    """

    v2_mount: Path | None
    v2_controllers: frozenset[str]
    v1: Mapping[str, Path] = field(default_factory=dict)
    own: Mapping[str, Path] = field(default_factory=dict)

    def version_of(self, controller: str) -> int | None:
        """1, 2, or None where no hierarchy has this controller. A controller is only in one."""
        if controller in self.v1:
            return 1
        return 2 if controller in self.v2_controllers else None

    def mount_of(self, controller: str) -> Path | None:
        """Mount point of the hierarchy that has ``controller``."""
        return self.v1.get(controller, self.v2_mount if self.version_of(controller) else None)


def layout(pid: int | str = "self") -> CgroupLayout:
    """The layout as ``pid`` has it."""
    membership = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    mounts = mountinfo()
    found = parse_layout(mounts, membership)
    if found.v2_mount is None:
        return found
    controllers = (found.v2_mount / "cgroup.controllers").read_text(encoding="ascii").split()
    return CgroupLayout(found.v2_mount, frozenset(controllers), found.v1, found.own)


def parse_layout(mounts: list[Mount] | str, membership: str) -> CgroupLayout:
    """The layout from the texts of mountinfo and /proc/PID/cgroup, but for ``v2_controllers``."""
    if isinstance(mounts, str):
        mounts = parse_mountinfo(mounts)
    own_names = _membership(membership)
    v2_mount: Path | None = None
    v1: dict[str, Path] = {}
    own: dict[str, Path] = {}
    for mount in mounts:
        if mount.fstype == "cgroup2" and v2_mount is None:
            v2_mount = Path(mount.mountpoint)
            _note_own(own, "", own_names, mount)
        elif mount.fstype == "cgroup":
            # Controllers are the super options that /proc/PID/cgroup knows as such.
            for controller in mount.super_options & own_names.keys() - v1.keys():
                v1[controller] = Path(mount.mountpoint)
                _note_own(own, controller, own_names, mount)
    return CgroupLayout(v2_mount, frozenset(), MappingProxyType(v1), MappingProxyType(own))


def _membership(text: str) -> dict[str, str]:
    """Cgroup name by controller ("" is v2), from lines like ``4:cpu,cpuacct:/name``."""
    names = {}
    for line in text.splitlines():
        _, controllers, name = line.split(":", 2)
        for controller in controllers.split(","):
            if not controller.startswith("name="):
                names[controller] = name
    return names


def _note_own(own: dict[str, Path], key: str, names: Mapping[str, str], mount: Mount) -> None:
    # A bind mount or a container shows part of the hierarchy only: its root is not "/".
    name = names.get(key)
    if name is None:
        return
    with contextlib.suppress(ValueError):
        own[key] = Path(mount.mountpoint) / Path(name).relative_to(mount.root)


def make(path: Path) -> None:
    """Make a cgroup; one that is there already is taken as it is. Its parent must exist."""
    with contextlib.suppress(FileExistsError):
        path.mkdir()


def enable_controllers(path: Path, controllers: frozenset[str]) -> frozenset[str]:
    """Hand ``controllers`` on to the children of a v2 cgroup; returns those that were.

    EBUSY where processes live in ``path`` itself (the no-internal-processes rule).
    """
    available = frozenset((path / "cgroup.controllers").read_text(encoding="ascii").split())
    wanted = controllers & available
    if wanted:
        write(path / "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(wanted)))
    return wanted


def write(file: Path | str, value: str | int) -> None:
    """Write a control file in one write(2), so that its error is that of the write."""
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    except OSError as error:
        raise _libc.oserror(error.errno or 0, f"write {value!r} to {file}") from None
    finally:
        os.close(fd)


def read_keyed(file: Path) -> dict[str, int]:
    """A flat keyed file: ``populated 1`` and the like."""
    pairs = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def open_directory(path: Path) -> int:
    """A descriptor for clone3's CLONE_INTO_CGROUP. Not O_PATH: that gives EBADF."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def add_process(path: Path, pid: int) -> None:
    """Move a process (all its threads); 0 is the writer itself."""
    write(path / "cgroup.procs", pid)


def processes(path: Path) -> list[int]:
    """The processes right in this cgroup. 0 is one that the reader's pid namespace cannot name."""
    return [int(line) for line in (path / "cgroup.procs").read_text(encoding="ascii").split()]


def subtree(path: Path) -> Iterator[Path]:
    """The cgroups below ``path`` and itself, children before their parent."""
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from subtree(Path(entry.path))
    yield path


def populated(path: Path) -> bool:
    """Whether a process lives in a v2 cgroup or below (zombies do not count)."""
    return bool(read_keyed(path / "cgroup.events")["populated"])


def kill(path: Path) -> None:
    """SIGKILL everything in a v2 cgroup and below, what is being forked included (Linux 5.14)."""
    write(path / "cgroup.kill", 1)


def freeze(path: Path, frozen: bool, deadline: float) -> bool:
    """Freeze or thaw a v2 cgroup and wait for it; False when ``deadline`` came first.

    ``deadline`` is on the clock of ``time.monotonic``, here and below.
    """
    write(path / "cgroup.freeze", int(frozen))
    return _wait_event(path, "frozen", int(frozen), deadline)


def wait_empty(path: Path, deadline: float) -> bool:
    """Wait until no process lives in a v2 cgroup; False when ``deadline`` came first."""
    return _wait_event(path, "populated", 0, deadline)


def _wait_event(path: Path, key: str, value: int, deadline: float) -> bool:
    """``cgroup.events`` wakes poll(2) with POLLPRI when it has changed since it was read."""
    fd = os.open(path / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    try:
        poller = select.poll()
        poller.register(fd, select.POLLPRI)
        while True:
            if f"{key} {value}" in os.pread(fd, 256, 0).decode("ascii").splitlines():
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            poller.poll(left_s * 1000)
    finally:
        os.close(fd)


def remove_tree(path: Path, deadline: float) -> None:
    """Remove a cgroup and all below it; one that is gone already is no error.

    EBUSY is waited out until ``deadline`` and then raised: a process still lives there.
    """
    with contextlib.suppress(OSError):
        # Nearly always there is nothing below, and to list a cgroup's files costs far more.
        path.rmdir()
        return
    for child in subtree(path):
        _remove(child, deadline)


def _remove(path: Path, deadline: float) -> None:
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
        else:
            return
        # On v2 the wait is for the event; the pause covers v1, and the moment in which a cgroup
        # whose last process has ended is not yet given back.
        with contextlib.suppress(FileNotFoundError):
            wait_empty(path, deadline)
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
