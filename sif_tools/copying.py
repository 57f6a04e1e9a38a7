"""Copy ranges between files, inside the kernel where it can. OSError where it fails."""

from __future__ import annotations

import os


def copy_range(source: int, target: int, count: int, source_at: int, target_at: int) -> int:
    """Copy up to `count` bytes between two files; returns how many, 0 at the source's end."""
    try:
        return os.copy_file_range(source, target, count, source_at, target_at)
    except OSError:
        # EXDEV, EINVAL, ENOSYS, EOPNOTSUPP: what cannot be copied inside the kernel (two file
        # systems before Linux 5.19, some network ones) is copied through memory. A real failure
        # (ENOSPC, EIO) shows again there.
        data = os.pread(source, count, source_at)
        pwrite(target, data, target_at)
        return len(data)


def pwrite(fd: int, data: bytes, offset: int) -> None:
    """Write all of it at a place."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count
