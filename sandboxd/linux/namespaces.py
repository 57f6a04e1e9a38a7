"""Namespaces: leaving, entering and naming them, and the id maps of user namespaces."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Final, Literal

from sandboxd.linux import _libc

# <linux/sched.h>; the same flags serve clone(2), unshare(2) and setns(2).
CLONE_NEWTIME: Final = 0x0000_0080
CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWCGROUP: Final = 0x0200_0000
CLONE_NEWUTS: Final = 0x0400_0000
CLONE_NEWIPC: Final = 0x0800_0000
CLONE_NEWUSER: Final = 0x1000_0000
CLONE_NEWPID: Final = 0x2000_0000
CLONE_NEWNET: Final = 0x4000_0000

Name = Literal["cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time", "user", "uts"]

IdMap = Iterable[tuple[int, int, int]]
"""Ranges of (first id inside, first id outside, count), as in user_namespaces(7)."""

_unshare = _libc.function("unshare", ctypes.c_int)
_setns = _libc.function("setns", ctypes.c_int, ctypes.c_int)


def unshare(flags: int) -> None:
    """unshare(2). With CLONE_NEWUSER the calling process must have one thread."""
    _unshare(f"unshare {flags:#x}", flags)


def setns(fd: int, flags: int = 0) -> None:
    """setns(2). ``fd``: a namespace, or (since Linux 5.8, with flags) a pidfd."""
    _setns(f"setns {flags:#x}", fd, flags)


def write_id_map(
    pid: int | Literal["self"], uid_map: IdMap, gid_map: IdMap, setgroups: bool = True
) -> None:
    """Map the ids of the user namespace that ``pid`` made. Each map can be written once.

    ``setgroups=False`` gives up setgroups(2) in there: a writer without CAP_SETGID outside must,
    before the group map.
    """
    if not setgroups:
        _write_once(f"/proc/{pid}/setgroups", "deny")
    _write_once(f"/proc/{pid}/uid_map", _map_text(uid_map))
    _write_once(f"/proc/{pid}/gid_map", _map_text(gid_map))


def drop_groups() -> None:
    """Give up all supplementary groups. Where setgroups(2) was given up before (a user namespace of
    one id), they stay: they are then the user's own, and give nobody more than he has."""
    with open("/proc/self/setgroups", encoding="ascii") as file:
        if file.read().strip() == "allow":
            os.setgroups([])


def _map_text(id_map: IdMap) -> str:
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in id_map)


def _write_once(path: str, text: str) -> None:
    # The kernel takes a map in one write(2) only. Not through open(): it would report at close.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise _libc.oserror(error.errno or 0, f"write {path}") from None
    finally:
        os.close(fd)


def namespace_id(pid: int | Literal["self"], name: Name) -> int:
    """The inode number that tells one namespace from another, namespaces(7)."""
    return os.stat(f"/proc/{pid}/ns/{name}").st_ino


def open_namespace(pid: int | Literal["self"], name: Name) -> int:
    """A close-on-exec descriptor of a namespace of ``pid``."""
    return os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
