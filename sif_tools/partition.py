"""Decide whether a SIF's primary partition may be mounted here, and say where it lies.

This stands between untrusted bytes and a squashfs parser, so it checks all that can be checked
without parsing metadata blocks: type, magic, superblock, bounds, architecture. It does not
vouch for the file system's inside: a corrupt block still shows as EIO to whoever reads it.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Final

from sif_tools.errors import (
    BadSquashfs,
    NoPrimaryPartition,
    UnsupportedPartition,
    WrongArchitecture,
)
from sif_tools.format import UNKNOWN_ARCH, FsType, PartType, machine_arch
from sif_tools.reader import Descriptor, FdOrPath, Sif, opened
from sif_tools.superblock import Superblock, read_superblock

# Apptainer reads this much at a partition's start before it looks at it, and refuses less.
MIN_PARTITION_BYTES: Final = 2048


@dataclass(frozen=True, slots=True)
class Partition:
    """A primary squashfs partition that passed every check."""

    offset_bytes: int
    size_bytes: int
    arch: str
    superblock: Superblock


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
    partition = squashfs_partition(sif, source)
    _check_arch(partition.arch, platform.machine() if machine is None else machine)
    return partition


def squashfs_partition(sif: Sif, source: FdOrPath) -> Partition:
    """The same for reading it here, whatever machine it is made for."""
    return _checked(primary_partition(sif), source)


def mountable_overlay(sif: Sif, source: FdOrPath, machine: str | None = None) -> Partition:
    """Like `mountable_partition`, for the one partition of a SIF that is laid over others."""
    partition = overlay_partition(sif, source)
    _check_arch(partition.arch, platform.machine() if machine is None else machine)
    return partition


def overlay_partition(sif: Sif, source: FdOrPath) -> Partition:
    """The same for reading it here, whatever machine it is made for."""
    partitions = [one for one in sif.descriptors if one.is_partition]
    if len(partitions) != 1 or partitions[0].part_type != PartType.OVERLAY:
        raise UnsupportedPartition("it has something else than one overlay partition")
    return _checked(partitions[0], source)


def _checked(one: Descriptor, source: FdOrPath) -> Partition:
    if one.fs_type != FsType.SQUASHFS:
        what = "primary partition" if one.is_primary else "overlay partition"
        raise UnsupportedPartition(
            f"{what} is {_fs_type_name(one.fs_type)}, only squashfs can be mounted"
        )
    return _check_squashfs(one, source)


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
        superblock = read_superblock(fd, primary.offset_bytes, primary.size_bytes)
    return Partition(
        offset_bytes=primary.offset_bytes,
        size_bytes=primary.size_bytes,
        arch=primary.arch,
        superblock=superblock,
    )


def _fs_type_name(fs_type: int) -> str:
    try:
        return FsType(fs_type).name.lower().replace("_", " ")
    except ValueError:
        return f"of unknown type {fs_type}"
