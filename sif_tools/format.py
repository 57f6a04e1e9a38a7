"""The SIF container as it lies on disk: structs, constants, architecture codes.

Only layout: what is *valid* is decided in `reader`, what is *made* in `writer`. Every integer is
little-endian and the structs are packed. A file is::

    0      header, 128 bytes
    4096   descriptor table, 48 x 585 bytes (by default)
    32176  data objects, each where its descriptor says; partitions start at a multiple of 4096

    header      0 launch script[32]     64 created i64            104 table size i64
               32 magic[10]             72 modified i64           112 data offset i64
               42 version[3]            80 descriptors free i64   120 data size i64
               45 arch[3]               88 descriptors total i64
               48 UUID[16]              96 table offset i64

    descriptor  0 data type i32         17 offset i64             57 uid i64
                4 used u8               25 size i64               65 gid i64
                5 id u32                33 size with padding i64  73 name[128]
                9 group u32             41 created i64           201 extra[384]
               13 linked id u32         49 modified i64

    extra of a partition: fs type i32, part type i32, arch[3]
    extra of a signature: hash type i32, entity[256]
    extra of an OCI blob or root index: ASCII "sha256:<hex>"

Old writers put the data at 32768 and page-aligned every object: readers follow the offsets.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

HEADER: Final = struct.Struct("<32s10s3s3s16sqqqqqqqq")
DESCRIPTOR: Final = struct.Struct("<iBIIIqqqqqqq128s384s")
PARTITION_EXTRA: Final = struct.Struct("<ii3s")

MAGIC: Final = b"SIF_MAGIC\0"
VERSION: Final = b"01\0"
LAUNCH_SCRIPT: Final = b"#!/usr/bin/env run-singularity\n"

DESCRIPTOR_OFFSET: Final = 4096
DEFAULT_DESCRIPTORS: Final = 48
PARTITION_ALIGNMENT: Final = 4096
# The two upper halves of a u32 that tell a group from an object id.
GROUP_MASK: Final = 0xF0000000
# Go's zero time in Unix seconds; what deterministic writers put into every time field.
ZERO_TIME: Final = -62135596800


class DataType(IntEnum):
    """What a data object is."""

    DEFFILE = 0x4001
    ENV = 0x4002
    LABELS = 0x4003
    PARTITION = 0x4004
    SIGNATURE = 0x4005
    JSON = 0x4006
    GENERIC = 0x4007
    CRYPTO_MESSAGE = 0x4008
    SBOM = 0x4009
    OCI_ROOT_INDEX = 0x400A
    OCI_BLOB = 0x400B


class FsType(IntEnum):
    """The file system inside a partition."""

    SQUASHFS = 1
    EXT3 = 2
    ARCHIVE = 3
    RAW = 4
    ENCRYPTED_SQUASHFS = 5
    GOCRYPTFS = 6


class PartType(IntEnum):
    """What a partition is for."""

    SYSTEM = 1
    PRIMARY_SYSTEM = 2
    DATA = 3
    OVERLAY = 4


UNKNOWN_ARCH: Final = "unknown"

# Go's (and so OCI's) architecture names against the two digits in headers and partitions.
ARCH_CODES: Final[dict[str, str]] = {
    UNKNOWN_ARCH: "00",
    "386": "01",
    "amd64": "02",
    "arm": "03",
    "arm64": "04",
    "ppc64": "05",
    "ppc64le": "06",
    "mips": "07",
    "mipsle": "08",
    "mips64": "09",
    "mips64le": "10",
    "s390x": "11",
    "riscv64": "12",
    "loong64": "13",
}
_ARCH_NAMES: Final = {code: name for name, code in ARCH_CODES.items()}

# `uname -m` (platform.machine()) against Go's names; ARMv6 and v7 hosts run the same "arm".
_MACHINE_ARCH: Final = {
    "x86_64": "amd64",
    "amd64": "amd64",
    "i386": "386",
    "i486": "386",
    "i586": "386",
    "i686": "386",
    "aarch64": "arm64",
    "arm64": "arm64",
    "armv6l": "arm",
    "armv7l": "arm",
    "armv8l": "arm",
    "ppc64": "ppc64",
    "ppc64le": "ppc64le",
    "mips": "mips",
    "mips64": "mips64",
    "s390x": "s390x",
    "riscv64": "riscv64",
    "loongarch64": "loong64",
}


def arch_name(code: bytes) -> str:
    """Go's name of a 3-byte code as stored (`02\\0`), `unknown` for 00 and for any other."""
    return _ARCH_NAMES.get(code.split(b"\0", 1)[0].decode("latin-1"), UNKNOWN_ARCH)


def arch_code(name: str) -> bytes:
    """The 3 bytes to store for Go's name; KeyError for an architecture SIF has no code for."""
    return ARCH_CODES[name].encode("ascii") + b"\0"


def machine_arch(machine: str) -> str:
    """Go's name for what `uname -m` prints, `unknown` for a machine SIF has no code for."""
    return _MACHINE_ARCH.get(machine, UNKNOWN_ARCH)
