"""Mounts: mount(2) and its kin, mounts as file descriptors, and reading mountinfo.

For: whoever builds a root. Not for: deciding what is mounted where; that is ``rootfs``.

Mounts as file descriptors (since Linux 5.2)::

    fsopen -> fsconfig ... -> fsconfig_create -> fsmount -> move_mount
    open_tree(OPEN_TREE_CLONE) ---------------------------^
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sandboxd.linux import _libc
from sandboxd.linux._libc import StrPath, encoded, optional

# <linux/mount.h>: mount(2)
MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_NOSYMFOLLOW: Final = 256
MS_NOATIME: Final = 1024
MS_BIND: Final = 4096
MS_MOVE: Final = 8192
MS_REC: Final = 16384
MS_UNBINDABLE: Final = 1 << 17
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MS_SHARED: Final = 1 << 20
MS_RELATIME: Final = 1 << 21

# <sys/mount.h>: umount2(2)
MNT_FORCE: Final = 1
MNT_DETACH: Final = 2
MNT_EXPIRE: Final = 4
UMOUNT_NOFOLLOW: Final = 8

# <linux/mount.h>: the mount API of file descriptors
OPEN_TREE_CLONE: Final = 1
OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
MOVE_MOUNT_F_SYMLINKS: Final = 0x01
MOVE_MOUNT_F_AUTOMOUNTS: Final = 0x02
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x04
MOVE_MOUNT_T_SYMLINKS: Final = 0x10
MOVE_MOUNT_T_AUTOMOUNTS: Final = 0x20
MOVE_MOUNT_T_EMPTY_PATH: Final = 0x40
FSOPEN_CLOEXEC: Final = 1
FSMOUNT_CLOEXEC: Final = 1
FSCONFIG_SET_FLAG: Final = 0
FSCONFIG_SET_STRING: Final = 1
FSCONFIG_SET_FD: Final = 5
FSCONFIG_CMD_CREATE: Final = 6
FSCONFIG_CMD_RECONFIGURE: Final = 7
MOUNT_ATTR_RDONLY: Final = 0x01
MOUNT_ATTR_NOSUID: Final = 0x02
MOUNT_ATTR_NODEV: Final = 0x04
MOUNT_ATTR_NOEXEC: Final = 0x08
MOUNT_ATTR_NOATIME: Final = 0x10
MOUNT_ATTR_STRICTATIME: Final = 0x20
MOUNT_ATTR_NODIRATIME: Final = 0x80
MOUNT_ATTR_IDMAP: Final = 0x0010_0000
MOUNT_ATTR_NOSYMFOLLOW: Final = 0x0020_0000

# <fcntl.h>
AT_FDCWD: Final = -100
AT_SYMLINK_NOFOLLOW: Final = 0x100
AT_NO_AUTOMOUNT: Final = 0x800
AT_EMPTY_PATH: Final = 0x1000
AT_RECURSIVE: Final = 0x8000


class MountAttr(ctypes.Structure):
    """``struct mount_attr`` of mount_setattr(2), MOUNT_ATTR_SIZE_VER0."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


# <asm/unistd.h>
NR_PIVOT_ROOT: Final = _libc.by_machine(155, 41)
NR_OPEN_TREE: Final = 428
NR_MOVE_MOUNT: Final = 429
NR_FSOPEN: Final = 430
NR_FSCONFIG: Final = 431
NR_FSMOUNT: Final = 432
NR_MOUNT_SETATTR: Final = 442

_int, _uint, _str = ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
_mount = _libc.function("mount", _str, _str, _str, ctypes.c_ulong, _str)
_umount2 = _libc.function("umount2", _str, _int)
_pivot_root = _libc.syscall(NR_PIVOT_ROOT, _str, _str)
_open_tree = _libc.syscall(NR_OPEN_TREE, _int, _str, _uint)
_move_mount = _libc.syscall(NR_MOVE_MOUNT, _int, _str, _int, _str, _uint)
_fsopen = _libc.syscall(NR_FSOPEN, _str, _uint)
_fsconfig = _libc.syscall(NR_FSCONFIG, _int, _uint, _str, _str, _int)
_fsmount = _libc.syscall(NR_FSMOUNT, _int, _uint, _uint)
_mount_setattr = _libc.syscall(
    NR_MOUNT_SETATTR, _int, _str, _uint, ctypes.POINTER(MountAttr), ctypes.c_size_t
)


def mount(
    source: StrPath | None,
    target: StrPath,
    fstype: str | None = None,
    flags: int = 0,
    data: str | None = None,
) -> None:
    """mount(2)."""
    kind = None if fstype is None else fstype.encode()
    _mount(
        f"mount {fstype or ''} on {os.fsdecode(target)}",
        optional(source),
        encoded(target),
        kind,
        flags,
        optional(data),
    )


def umount2(target: StrPath, flags: int = 0) -> None:
    """umount2(2)."""
    _umount2(f"umount2 {os.fsdecode(target)}", encoded(target), flags)


def pivot_root(new_root: StrPath, put_old: StrPath) -> None:
    """pivot_root(2); with "." twice the old root ends up mounted over the new one."""
    _pivot_root(f"pivot_root {os.fsdecode(new_root)}", encoded(new_root), encoded(put_old))


def fsopen(fstype: str) -> int:
    """fsopen(2): a close-on-exec context to configure a new file system in."""
    return _fsopen(f"fsopen {fstype}", encoded(fstype), FSOPEN_CLOEXEC)


def fsconfig_set_string(fs_fd: int, key: str, value: str) -> None:
    _fsconfig(
        f"fsconfig {key}={value}", fs_fd, FSCONFIG_SET_STRING, encoded(key), encoded(value), 0
    )


def fsconfig_set_flag(fs_fd: int, key: str) -> None:
    _fsconfig(f"fsconfig {key}", fs_fd, FSCONFIG_SET_FLAG, encoded(key), None, 0)


def fsconfig_set_fd(fs_fd: int, key: str, fd: int) -> None:
    """Give an object by descriptor; overlay takes its layers this way since Linux 6.13."""
    _fsconfig(f"fsconfig {key}=fd {fd}", fs_fd, FSCONFIG_SET_FD, encoded(key), None, fd)


def fsconfig_create(fs_fd: int) -> None:
    """Make the superblock. What the kernel has to say about a failure: ``fs_log``."""
    _fsconfig("fsconfig create", fs_fd, FSCONFIG_CMD_CREATE, None, None, 0)


def fsconfig_reconfigure(fs_fd: int) -> None:
    _fsconfig("fsconfig reconfigure", fs_fd, FSCONFIG_CMD_RECONFIGURE, None, None, 0)


def fsmount(fs_fd: int, attr: int = 0) -> int:
    """fsmount(2): a close-on-exec descriptor of a mount that is attached nowhere yet.

    It is an O_PATH one: good for ``dir_fd=``, fchdir(2) and move_mount, not for reading.
    """
    return _fsmount("fsmount", fs_fd, FSMOUNT_CLOEXEC, attr)


def open_tree(dir_fd: int, path: StrPath, flags: int) -> int:
    """open_tree(2). With OPEN_TREE_CLONE a detached bind mount, else an O_PATH descriptor."""
    return _open_tree(f"open_tree {os.fsdecode(path)}", dir_fd, encoded(path), flags)


def move_mount(
    from_dir_fd: int, from_path: StrPath, to_dir_fd: int, to_path: StrPath, flags: int
) -> None:
    """move_mount(2)."""
    _move_mount(
        f"move_mount to {os.fsdecode(to_path)}",
        from_dir_fd,
        encoded(from_path),
        to_dir_fd,
        encoded(to_path),
        flags,
    )


def mount_setattr(
    dir_fd: int,
    path: StrPath,
    flags: int = 0,
    *,
    attr_set: int = 0,
    attr_clr: int = 0,
    propagation: int = 0,
    userns_fd: int = 0,
) -> None:
    """mount_setattr(2), since Linux 5.12. ``userns_fd`` counts with MOUNT_ATTR_IDMAP only."""
    attr = MountAttr(attr_set, attr_clr, propagation, userns_fd)
    _mount_setattr(
        f"mount_setattr {os.fsdecode(path)}",
        dir_fd,
        encoded(path),
        flags,
        ctypes.byref(attr),
        ctypes.sizeof(attr),
    )


def fs_log(fs_fd: int) -> list[str]:
    """What the kernel logged to a file system context; each line is told once (fsopen(2))."""
    lines = []
    os.set_blocking(fs_fd, False)
    with contextlib.suppress(OSError):  # ENODATA: no more
        while line := os.read(fs_fd, 4096):
            lines.append(line.decode(errors="replace").rstrip("\n"))
    return lines


Options = Mapping[str, str | int | None]


def fs_context(
    fstype: str, options: Options | Iterable[tuple[str, str | int | None]], attr: int = 0
) -> int:
    """Make a file system and its detached mount; returns the mount's descriptor.

    ``options`` are set in order; a value of None sets a flag, an int gives a file descriptor, a str
    anything else. Pairs instead of a mapping where a key comes more than once (``lowerdir+``). The
    kernel's own log lines follow the error's text.
    """
    pairs = options.items() if isinstance(options, Mapping) else options
    fs_fd = fsopen(fstype)
    try:
        for key, value in pairs:
            if value is None:
                fsconfig_set_flag(fs_fd, key)
            elif isinstance(value, int):
                fsconfig_set_fd(fs_fd, key, value)
            else:
                fsconfig_set_string(fs_fd, key, value)
        fsconfig_create(fs_fd)
        return fsmount(fs_fd, attr)
    except OSError as error:
        log = "; ".join(fs_log(fs_fd))
        text = f"{error.strerror} ({log})" if log else error.strerror
        raise OSError(error.errno, text, f"{error.filename} of {fstype}") from None
    finally:
        os.close(fs_fd)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo, proc_pid_mountinfo(5)."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    mountpoint: str
    options: frozenset[str]
    propagation: tuple[str, ...]
    fstype: str
    source: str
    super_options: frozenset[str]


_OCTAL = re.compile(r"\\([0-7]{3})")


def _unescaped(text: str) -> str:
    """Space, tab, newline and backslash are written as ``\\040`` and so on."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in ``text``, in its order: a later one hides an earlier one at the same place."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        mount_id, parent_id, device, root, mountpoint, options, *optional_fields = before.split(" ")
        # The source may be empty, and then there are two spaces.
        fstype, source, super_options = after.split(" ", 2)
        mounts.append(
            Mount(
                int(mount_id),
                int(parent_id),
                device,
                _unescaped(root),
                _unescaped(mountpoint),
                frozenset(options.split(",")),
                tuple(optional_fields),
                _unescaped(fstype),
                _unescaped(source),
                # Overlay's layer names may hold escaped commas, so only whole options unescape.
                frozenset(_unescaped(option) for option in super_options.split(",")),
            )
        )
    return mounts


def mountinfo(path: StrPath = "/proc/self/mountinfo") -> list[Mount]:
    """The mounts of a process, read in one go."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return parse_mountinfo(file.read())
