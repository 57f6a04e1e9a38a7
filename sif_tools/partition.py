"""Decide whether a SIF's primary partition may be mounted here, and say where it lies.

This stands between untrusted bytes and a squashfs parser, so it checks all that can be checked
without parsing metadata blocks: type, magic, superblock, bounds, architecture. It does not
vouch for the file system's inside: a corrupt block still shows as EIO to whoever reads it.
"""

from __future__ import annotations

import platform
import struct
from dataclasses import dataclass
from typing import Final

from sif_tools.errors import (
    BadSquashfs,
    NoPrimaryPartition,
    UnsupportedPartition,
    WrongArchitecture,
)
from sif_tools.format import UNKNOWN_ARCH, FsType, machine_arch
from sif_tools.reader import Descriptor, FdOrPath, Sif, opened, pread

# Apptainer reads this much at a partition's start before it looks at it, and refuses less.
MIN_PARTITION_BYTES: Final = 2048

# Squashfs 4.0 superblock (kernel: fs/squashfs/squashfs_fs.h): magic, inodes, mtime, block size,
# fragments, compression, block log, flags, ids, major, minor, root inode, bytes used, then the
# starts of the id, xattr, inode, directory, fragment and export tables.
_SUPERBLOCK: Final = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_MAGIC: Final = b"hsqs"
_ABSENT: Final = 0xFFFFFFFFFFFFFFFF
_COMPRESSIONS: Final = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
_MIN_BLOCK_LOG: Final = 12
_MAX_BLOCK_LOG: Final = 20


@dataclass(frozen=True, slots=True)
class Partition:
    """A primary squashfs partition that passed every check."""

    offset_bytes: int
    size_bytes: int
    arch: str
    compression: str
    block_size_bytes: int
    bytes_used: int
    inodes: int


def primary_partition(sif: Sif) -> Descriptor:
    """The primary system partition's descriptor; NoPrimaryPartition where there is none."""
    primary = sif.primary
    if primary is None:
        raise NoPrimaryPartition("the SIF has no primary system partition")
    return primary


def mountable_partition(sif: Sif, source: FdOrPath, machine: str | None = None) -> Partition:
    """Check the primary partition against this host and return where it lies.

    `machine` is what `uname -m` prints (default: this host's). Raises NoPrimaryPartition,
    UnsupportedPartition, BadSquashfs, WrongArchitecture or Unreadable.
    """
    primary = primary_partition(sif)
    if primary.fs_type != FsType.SQUASHFS:
        raise UnsupportedPartition(
            f"primary partition is {_fs_type_name(primary.fs_type)}, only squashfs can be mounted"
        )
    partition = _check_squashfs(primary, source)
    _check_arch(primary.arch, platform.machine() if machine is None else machine)
    return partition


def _check_arch(arch: str, machine: str) -> None:
    # Exactly the host's: 386 on amd64 would run but for the sandboxes' seccomp filter, which has
    # no rules for the 32-bit system call table.
    host = machine_arch(machine)
    if arch == UNKNOWN_ARCH or arch != host:
        raise WrongArchitecture(f"the image is made for {arch}, this host is {machine} ({host})")


def _check_squashfs(primary: Descriptor, source: FdOrPath) -> Partition:
    if primary.size_bytes < MIN_PARTITION_BYTES:
        raise BadSquashfs(
            f"primary partition has {primary.size_bytes} bytes, "
            f"the smallest squashfs has {MIN_PARTITION_BYTES}"
        )
    with opened(source) as fd:
        raw = pread(fd, _SUPERBLOCK.size, primary.offset_bytes)
    if len(raw) < _SUPERBLOCK.size:
        raise BadSquashfs("primary partition ends past the end of the file")
    fields = _SUPERBLOCK.unpack(raw)
    magic, inodes, _mtime, block_size, _fragments, compression, block_log = fields[:7]
    _flags, ids, major, minor, _root, bytes_used, *tables = fields[7:]
    if magic != _MAGIC:
        raise BadSquashfs("primary partition has no squashfs magic")
    if (major, minor) != (4, 0):
        raise BadSquashfs(f"squashfs version {major}.{minor}, only 4.0 is known")
    if not _MIN_BLOCK_LOG <= block_log <= _MAX_BLOCK_LOG or block_size != 1 << block_log:
        raise BadSquashfs(f"squashfs block size {block_size} (log {block_log})")
    if compression not in _COMPRESSIONS:
        raise BadSquashfs(f"squashfs compression id {compression} is not known")
    if not _SUPERBLOCK.size <= bytes_used <= primary.size_bytes:
        raise BadSquashfs(
            f"squashfs uses {bytes_used} bytes of a partition of {primary.size_bytes}"
        )
    if inodes == 0 or ids == 0:
        raise BadSquashfs("squashfs without inodes or ids")
    for start in tables:
        if start != _ABSENT and not _SUPERBLOCK.size <= start <= bytes_used:
            raise BadSquashfs(f"squashfs table at {start}, outside its {bytes_used} bytes")
    return Partition(
        offset_bytes=primary.offset_bytes,
        size_bytes=primary.size_bytes,
        arch=primary.arch,
        compression=_COMPRESSIONS[compression],
        block_size_bytes=block_size,
        bytes_used=bytes_used,
        inodes=inodes,
    )


def _fs_type_name(fs_type: int) -> str:
    try:
        return FsType(fs_type).name.lower().replace("_", " ")
    except ValueError:
        return f"of unknown type {fs_type}"
