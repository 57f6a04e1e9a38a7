"""openat2(2): opening a file without leaving a directory, or following what lies in the way."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

from sandboxd.linux import _libc

# <linux/openat2.h>
RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

NR_OPENAT2: Final = 437  # <asm/unistd.h>

INSIDE: Final = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV
"""Below the directory, of its mount, through real directories alone."""

_TRIES: Final = 64


class OpenHow(ctypes.Structure):
    """``struct open_how``, OPEN_HOW_SIZE_VER0."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_openat2 = _libc.syscall(
    NR_OPENAT2, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(OpenHow), ctypes.c_size_t
)


def openat2(dir_fd: int, path: bytes, flags: int, resolve: int = INSIDE) -> int:
    """A close-on-exec descriptor. OSError ELOOP for a symlink, EXDEV for what leads outside."""
    how = OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    for _ in range(_TRIES):
        try:
            return _openat2("openat2", dir_fd, path, ctypes.byref(how), ctypes.sizeof(how))
        except OSError as error:
            if error.errno != errno.EAGAIN:  # something was renamed meanwhile, anywhere
                raise
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "openat2")
