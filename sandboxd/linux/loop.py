"""Loop devices, loop(4): a file as a block device, gone by itself with its last user."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from typing import Final

from sandboxd.linux import _libc

# <linux/loop.h>
LOOP_CONFIGURE: Final = 0x4C0A
LOOP_CTL_GET_FREE: Final = 0x4C82
LO_FLAGS_READ_ONLY: Final = 1
LO_FLAGS_AUTOCLEAR: Final = 4

SECTOR_BYTES: Final = 512
"""Of a device, unless it is told otherwise: it begins at a multiple, and what its file has after
the last whole one is not on it."""

LOOP_MAJOR: Final = 7  # <linux/major.h>

TRIES: Final = 64
"""For a free device: whoever asks for one at the same time is told the same number."""


class LoopInfo64(ctypes.Structure):
    """``struct loop_info64``."""

    _fields_ = (
        ("lo_device", ctypes.c_uint64),
        ("lo_inode", ctypes.c_uint64),
        ("lo_rdevice", ctypes.c_uint64),
        ("lo_offset", ctypes.c_uint64),
        ("lo_sizelimit", ctypes.c_uint64),
        ("lo_number", ctypes.c_uint32),
        ("lo_encrypt_type", ctypes.c_uint32),
        ("lo_encrypt_key_size", ctypes.c_uint32),
        ("lo_flags", ctypes.c_uint32),
        ("lo_file_name", ctypes.c_uint8 * 64),
        ("lo_crypt_name", ctypes.c_uint8 * 64),
        ("lo_encrypt_key", ctypes.c_uint8 * 32),
        ("lo_init", ctypes.c_uint64 * 2),
    )


class LoopConfig(ctypes.Structure):
    """``struct loop_config``, since Linux 5.8."""

    _fields_ = (
        ("fd", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
        ("info", LoopInfo64),
        ("reserved", ctypes.c_uint64 * 8),
    )


def attach(file_fd: int) -> tuple[str, int]:
    """Make a device of a file; its path, and a descriptor that keeps it until something else does.

    It is cleared with its last user: who mounts it closes the descriptor. Needs the host's root.
    """
    return _attach(file_fd, os.O_RDWR, LoopInfo64(lo_flags=LO_FLAGS_AUTOCLEAR))


def attach_read_only(file_fd: int, offset_bytes: int) -> tuple[str, int]:
    """The same of what a file has from ``offset_bytes`` on, for reading.

    Through the page cache: so it is read ahead, which made reading all of an image from a disk half
    as fast again as past it (LO_FLAGS_DIRECT_IO).
    """
    info = LoopInfo64(lo_flags=LO_FLAGS_AUTOCLEAR | LO_FLAGS_READ_ONLY, lo_offset=offset_bytes)
    return _attach(file_fd, os.O_RDONLY, info)


def _attach(file_fd: int, mode: int, info: LoopInfo64) -> tuple[str, int]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            device = os.open(path, mode | os.O_CLOEXEC)
            config = LoopConfig(fd=file_fd, info=info)
            try:
                fcntl.ioctl(device, LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise _libc.oserror(error.errno or 0, f"LOOP_CONFIGURE {path}") from None
            else:
                return path, device
    finally:
        os.close(control)
    raise _libc.oserror(errno.EBUSY, "no free loop device")
