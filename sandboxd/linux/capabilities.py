"""Capabilities, capabilities(7): the sets of a process, its bounding set, its securebits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import prctl

from sandboxd.linux import _libc

# <linux/capability.h>, in the order of their numbers.
NAMES: Final = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
)

CAP_CHOWN: Final = 0
CAP_DAC_OVERRIDE: Final = 1
CAP_DAC_READ_SEARCH: Final = 2
CAP_FOWNER: Final = 3
CAP_FSETID: Final = 4
CAP_KILL: Final = 5
CAP_SETGID: Final = 6
CAP_SETUID: Final = 7
CAP_SETPCAP: Final = 8
CAP_NET_BIND_SERVICE: Final = 10
CAP_NET_ADMIN: Final = 12
CAP_NET_RAW: Final = 13
CAP_SYS_CHROOT: Final = 18
CAP_SYS_PTRACE: Final = 19
CAP_SYS_ADMIN: Final = 21
CAP_SYS_RESOURCE: Final = 24
CAP_MKNOD: Final = 27
CAP_SETFCAP: Final = 31

# <linux/securebits.h>
SECBIT_NOROOT: Final = 1 << 0
SECBIT_NOROOT_LOCKED: Final = 1 << 1
SECBIT_NO_SETUID_FIXUP: Final = 1 << 2
SECBIT_NO_SETUID_FIXUP_LOCKED: Final = 1 << 3
SECBIT_KEEP_CAPS: Final = 1 << 4
SECBIT_KEEP_CAPS_LOCKED: Final = 1 << 5
SECBIT_NO_CAP_AMBIENT_RAISE: Final = 1 << 6
SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED: Final = 1 << 7

PR_GET_SECUREBITS: Final = 27
PR_SET_SECUREBITS: Final = 28

LINUX_CAPABILITY_VERSION_3: Final = 0x2008_0522


class CapHeader(ctypes.Structure):
    """``struct __user_cap_header_struct``."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class CapData(ctypes.Structure):
    """``struct __user_cap_data_struct``; version 3 takes two: the low and the high 32 bits."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_CapDataPair = CapData * 2
_capget = _libc.function("capget", ctypes.POINTER(CapHeader), ctypes.POINTER(_CapDataPair))
_capset = _libc.function("capset", ctypes.POINTER(CapHeader), ctypes.POINTER(_CapDataPair))


@dataclass(frozen=True, slots=True)
class CapabilitySets:
    """Bit masks: bit n is capability number n."""

    effective: int
    permitted: int
    inheritable: int


def mask(capabilities: Iterable[int]) -> int:
    """The bit mask of some capability numbers."""
    result = 0
    for number in capabilities:
        result |= 1 << number
    return result


def names(bits: int) -> list[str]:
    """The names of the capabilities in a bit mask; ``CAP_41`` where there is no name yet."""
    return [
        NAMES[number] if number < len(NAMES) else f"CAP_{number}"
        for number in range(bits.bit_length())
        if bits >> number & 1
    ]


def last_cap() -> int:
    """The highest capability number the running kernel knows."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        return int(file.read())


def capget(pid: int = 0) -> CapabilitySets:
    """capget(2); ``pid`` 0 is the calling thread."""
    header = CapHeader(LINUX_CAPABILITY_VERSION_3, pid)
    data = _CapDataPair()
    _capget(f"capget {pid}", ctypes.byref(header), ctypes.byref(data))
    low, high = data
    return CapabilitySets(
        low.effective | high.effective << 32,
        low.permitted | high.permitted << 32,
        low.inheritable | high.inheritable << 32,
    )


def capset(effective: int, permitted: int, inheritable: int) -> None:
    """capset(2) of the calling thread, by bit masks."""
    header = CapHeader(LINUX_CAPABILITY_VERSION_3, 0)
    low, high = (
        [part >> shift & 0xFFFF_FFFF for part in (effective, permitted, inheritable)]
        for shift in (0, 32)
    )
    data = _CapDataPair(CapData(*low), CapData(*high))
    _capset("capset", ctypes.byref(header), ctypes.byref(data))


def drop_bounding(keep: Iterable[int]) -> None:
    """Drop everything from the bounding set that is not in ``keep`` (needs CAP_SETPCAP).

    Up to what the *kernel* knows: python-prctl's own ``capbset.limit`` stops at the capabilities it
    was compiled with, and would leave newer ones in.
    """
    kept = frozenset(keep)
    for number in range(last_cap() + 1):
        if number not in kept and prctl.capbset_read(number):
            prctl.capbset_drop(number)


def bounding() -> int:
    """The bounding set of the calling thread as a bit mask."""
    return mask(n for n in range(last_cap() + 1) if prctl.capbset_read(n))


def get_securebits() -> int:
    return _libc.prctl(PR_GET_SECUREBITS)


def set_securebits(bits: int) -> None:
    """PR_SET_SECUREBITS (needs CAP_SETPCAP)."""
    _libc.prctl(PR_SET_SECUREBITS, bits)
