"""Which file system a file lies on, fstatfs(2): Python's ``os.fstatvfs`` does not tell."""

from __future__ import annotations

import ctypes
from types import MappingProxyType
from typing import Final

from sandboxd.linux import _libc

# <linux/magic.h>; XFS and ZFS have theirs in statfs(2).
LOCAL: Final = MappingProxyType(
    {
        0x0102_1994: "tmpfs",
        0x9123_683E: "btrfs",
        0x5846_5342: "xfs",
        0xF2F5_2010: "f2fs",
        0x2FC1_2FC1: "zfs",
        0xEF53: "ext2/ext3/ext4",
    }
)
"""Those whose files only this machine changes."""

_STATFS_BYTES: Final = 120
"""``struct statfs`` of a 64-bit machine; it begins with a long, the magic number."""

_fstatfs = _libc.function("fstatfs", ctypes.c_int, ctypes.c_char_p)


def magic(fd: int) -> int:
    """The magic number of the file system that an open file is on."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    _fstatfs("fstatfs", fd, buffer)
    return int.from_bytes(buffer.raw[:4], "little")
