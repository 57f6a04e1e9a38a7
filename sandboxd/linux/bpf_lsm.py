"""One rule for the kernel's LSM ``bpf``: ``security.*`` attributes are not for a range of ids.

For: kernels on which that LSM is active and lets anybody set them (Debian 12's Linux 6.1: its empty
hook answers in place of the one that asks for CAP_SYS_ADMIN). On tmpfs they are memory there that
no cgroup is charged with and nothing bounds.

``security.capability`` is let pass: there is one of a file at most, and the kernel asks for
CAP_SETFCAP all the same.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Final

from sandboxd.linux import _libc
from sandboxd.linux.id_ranges import IdRange

BTF: Final = Path("/sys/kernel/btf/vmlinux")
"""The kernel's types: which function is the hook, and what its arguments are."""
_HOOK: Final = b"bpf_lsm_inode_setxattr"
_ARGUMENT: Final = b"name"
"""Of the hook. Its place differs: Linux 5.12 put another one before it."""
_LICENSE: Final = b"Dual MIT/GPL"
"""The kernel takes none for an LSM that is not GPL-compatible."""

# <linux/bpf.h>
_PROG_LOAD: Final = 5
_RAW_TRACEPOINT_OPEN: Final = 17
_PROG_TYPE_LSM: Final = 29
_LSM_MAC: Final = 27
_GET_CURRENT_UID_GID: Final = 15
_PROBE_READ_KERNEL_STR: Final = 115

# <linux/btf.h>
_BTF_MAGIC: Final = 0xEB9F
_FUNC: Final = 12
_OWN_WORDS: Final = {1: 1, 3: 3, 14: 1, 17: 1}
"""Beyond the three of every type, by kind."""
_MEMBER_WORDS: Final = {4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}


class _ProgLoad(ctypes.Structure):
    """``union bpf_attr`` of BPF_PROG_LOAD."""

    _fields_ = (
        ("prog_type", ctypes.c_uint32),
        ("insn_cnt", ctypes.c_uint32),
        ("insns", ctypes.c_uint64),
        ("license", ctypes.c_uint64),
        ("log_level", ctypes.c_uint32),
        ("log_size", ctypes.c_uint32),
        ("log_buf", ctypes.c_uint64),
        ("kern_version", ctypes.c_uint32),
        ("prog_flags", ctypes.c_uint32),
        ("prog_name", ctypes.c_char * 16),
        ("prog_ifindex", ctypes.c_uint32),
        ("expected_attach_type", ctypes.c_uint32),
        ("prog_btf_fd", ctypes.c_uint32),
        ("func_info_rec_size", ctypes.c_uint32),
        ("func_info", ctypes.c_uint64),
        ("func_info_cnt", ctypes.c_uint32),
        ("line_info_rec_size", ctypes.c_uint32),
        ("line_info", ctypes.c_uint64),
        ("line_info_cnt", ctypes.c_uint32),
        ("attach_btf_id", ctypes.c_uint32),
    )


class _RawTracepointOpen(ctypes.Structure):
    """The same of BPF_RAW_TRACEPOINT_OPEN, which attaches an LSM's program too (without a name)."""

    _fields_ = (("name", ctypes.c_uint64), ("prog_fd", ctypes.c_uint32))


_bpf = _libc.syscall(
    _libc.by_machine(321, 280), ctypes.c_ulong, ctypes.POINTER(ctypes.c_char), ctypes.c_ulong
)


def refuse_security_attributes(ids: IdRange) -> int:
    """Refuse them to whoever has one of these uids on the host, on any file.

    Returns the rule's descriptor, at whose end the rule ends. Raises OSError where the kernel takes
    no such program.
    """
    hook, place = _hook(BTF.read_bytes())
    code = _code(ids, place)
    instructions, license_text = ctypes.create_string_buffer(code), ctypes.c_char_p(_LICENSE)
    load = _ProgLoad(
        prog_type=_PROG_TYPE_LSM,
        insn_cnt=len(code) // 8,
        insns=ctypes.addressof(instructions),
        license=ctypes.cast(license_text, ctypes.c_void_p).value,
        prog_name=b"security_attrs",
        expected_attach_type=_LSM_MAC,
        attach_btf_id=hook,
    )
    program = _call("load a program of the LSM bpf", _PROG_LOAD, load)
    try:
        return _call("attach it", _RAW_TRACEPOINT_OPEN, _RawTracepointOpen(prog_fd=program))
    finally:
        os.close(program)


def _call(what: str, command: int, attributes: ctypes.Structure) -> int:
    """bpf(2), whose descriptors are all closed on exec."""
    size = ctypes.sizeof(attributes)
    raw = (ctypes.c_char * size).from_buffer(attributes)
    return _bpf(what, command, raw, size)


# --- the program -------------------------------------------------------------------------------

_Step = tuple[int, int, int, int | str, int]
"""Code, register, second register, offset or where a jump goes, value."""
_ALLOW: Final = "allow"
_REFUSE: Final = "refuse"


def _code(ids: IdRange, place: int) -> bytes:
    """The program, for a hook whose argument number ``place`` is the attribute's name.

    At first r1 points to the hook's arguments. r10 is the end of the stack, on which the 24 bytes
    from -24 on take the name's beginning: ``security.capability`` with its NUL has 20.
    """
    last = ids.first + ids.count - 1
    steps: list[_Step] = [
        (0xBF, 6, 1, 0, 0),  # r6 = r1
        (0x85, 0, 0, 0, _GET_CURRENT_UID_GID),
        (0xBC, 0, 0, 0, 0),  # r0 = its low half, the uid
        (0xB4, 1, 0, 0, ids.first),  # r1 = ids.first
        (0xAD, 0, 1, _ALLOW, 0),  # if r0 < r1
        (0xB4, 1, 0, 0, last),  # r1 = last
        (0x2D, 0, 1, _ALLOW, 0),  # if r0 > r1
        *((0x7A, 10, 0, offset, 0) for offset in (-24, -16, -8)),  # zeros
        (0xBF, 1, 10, 0, 0),  # r1 = r10
        (0x07, 1, 0, 0, -24),  # r1 -= 24
        (0xB7, 2, 0, 0, 24),  # r2 = 24
        (0x79, 3, 6, 8 * place, 0),  # r3 = the name
        (0x85, 0, 0, 0, _PROBE_READ_KERNEL_STR),
        *_unless(-24, b"secu", _ALLOW),
        *_unless(-20, b"rity", _ALLOW),
        (0x71, 1, 10, -16, 0),  # r1 = one byte
        (0x56, 1, 0, _ALLOW, ord(".")),  # if r1 is not that
        *_unless(-16, b".cap", _REFUSE),
        *_unless(-12, b"abil", _REFUSE),
        *_unless(-8, b"ity\0", _REFUSE),
        (0xB7, 0, 0, 0, 0),  # allow: r0 = 0
        (0x95, 0, 0, 0, 0),
        (0xB7, 0, 0, 0, -errno.EPERM),  # refuse: r0 = -EPERM
        (0x95, 0, 0, 0, 0),
    ]
    labels = {_ALLOW: len(steps) - 4, _REFUSE: len(steps) - 2}
    return b"".join(
        # struct bpf_insn. A jump's offset counts from the next one.
        struct.pack(
            "<BBhI",
            code,
            source << 4 | to,
            labels[offset] - at - 1 if isinstance(offset, str) else offset,
            value & 0xFFFF_FFFF,
        )
        for at, (code, to, source, offset, value) in enumerate(steps)
    )


def _unless(offset: int, four: bytes, label: str) -> tuple[_Step, _Step]:
    """Go to ``label`` where the stack holds other bytes at ``offset``."""
    word = int.from_bytes(four, "little")
    return (0x61, 1, 10, offset, 0), (0x56, 1, 0, label, word)


# --- the kernel's types ------------------------------------------------------------------------


def _hook(btf: bytes) -> tuple[int, int]:
    """The number of the hook's type, and which of its arguments is the name."""
    magic, _, _, header, types_at, types_length, names_at, names_length = struct.unpack_from(
        "<HBBIIIII", btf
    )
    if magic != _BTF_MAGIC:
        raise _libc.oserror(errno.EINVAL, f"{BTF} is of another form")
    names = btf[header + names_at :][:names_length]
    words = memoryview(btf[header + types_at :][:types_length]).cast("I")
    wanted = names.find(b"\0" + _HOOK + b"\0") + 1
    places, at = [0], 0  # type 0 is void, and has no place
    hook = 0
    while at < len(words) and wanted:
        if words[at] == wanted and words[at + 1] >> 24 & 0x1F == _FUNC:
            hook = len(places)
        places.append(at)
        kind = words[at + 1] >> 24 & 0x1F
        members = words[at + 1] & 0xFFFF
        at += 3 + _OWN_WORDS.get(kind, 0) + _MEMBER_WORDS.get(kind, 0) * members
    if not hook:
        raise _libc.oserror(errno.ENOENT, f"{BTF} has no {_HOOK.decode()}")
    prototype = places[words[places[hook] + 2]]
    arguments = words[prototype + 1] & 0xFFFF
    for number in range(arguments):
        name = words[prototype + 3 + 2 * number]
        if names[name : names.index(b"\0", name)] == _ARGUMENT:
            return hook, number
    raise _libc.oserror(errno.ENOENT, f"{_HOOK.decode()} has no {_ARGUMENT.decode()}")
