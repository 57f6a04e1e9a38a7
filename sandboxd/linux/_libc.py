"""The one handle to the C library, and how a prototype is declared on it.

For: the wrappers of this package. A prototype is made once, at import; the callable that comes back
checks the result and turns errno into ``OSError``. System calls go by number where Debian 12's C
library or an older one has no wrapper; the numbers from 424 on are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any, Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)

StrPath = str | bytes | os.PathLike[str]


def oserror(number: int, what: str) -> OSError:
    """The error for ``number``; ``what`` says which call on what."""
    return OSError(number, os.strerror(number), what)


def function(name: str, *argtypes: Any, restype: Any = ctypes.c_int) -> Callable[..., int]:
    """A C library function that answers -1 and errno; its first argument here is ``what``."""
    prototype = ctypes.CFUNCTYPE(restype, *argtypes, use_errno=True)
    call: Callable[..., int] = prototype((name, _LIBC))

    def checked(what: str, *args: Any) -> int:
        result = call(*args)
        if result < 0:
            raise oserror(ctypes.get_errno(), what)
        return result

    return checked


def syscall(number: int, *argtypes: Any) -> Callable[..., int]:
    """A system call by number, through syscall(2); its first argument here is ``what``."""
    checked = function("syscall", ctypes.c_long, *argtypes, restype=ctypes.c_long)

    def numbered(what: str, *args: Any) -> int:
        return checked(what, number, *args)

    return numbered


def by_machine(x86_64: int, generic: int) -> int:
    """A system call's number: that of x86-64, or of the table all newer architectures share."""
    return x86_64 if os.uname().machine == "x86_64" else generic


def encoded(path: StrPath) -> bytes:
    """``path`` as the kernel takes it. A NUL would cut the name short: EINVAL."""
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise oserror(errno.EINVAL, f"NUL in {raw!r}")
    return raw


def optional(path: StrPath | None) -> bytes | None:
    return None if path is None else encoded(path)


# All five as unsigned long: prctl(2) reads whole registers, and several options insist on zeros.
_prctl = function("prctl", *[ctypes.c_ulong] * 5)


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    """prctl(2), for options python-prctl does not cover."""
    return _prctl(f"prctl({option})", option, arg2, arg3, arg4, arg5)
