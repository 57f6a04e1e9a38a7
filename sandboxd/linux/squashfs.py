"""Squashfs mounted by the kernel, from part of a file: for bytes that are known.

The kernel parses what the file holds, and whoever can write a file system can attack its parser. So
this is for the host's root, who has looked at whose bytes they are (``host.images``).
"""

from __future__ import annotations

import errno
import os
from typing import Final

from sandboxd.linux import _libc, loop, mount

BLOCK_BYTES: Final = 4096
"""What writers of squashfs fill the last block of a file up to, so that a device has all of it."""
ATTRIBUTES: Final = mount.MOUNT_ATTR_RDONLY | mount.MOUNT_ATTR_NOSUID | mount.MOUNT_ATTR_NODEV


def mount_idmapped(file_fd: int, offset_bytes: int, user_ns: int) -> int:
    """The squashfs at ``offset_bytes`` of a file, its ids 0, 1, … those of ``user_ns``: a detached,
    private, read-only mount's descriptor. The loop device under it goes with its last user.

    OSError; EINVAL where the kernel takes no squashfs that is idmapped (it can since Linux 6.2).
    """
    if offset_bytes % loop.SECTOR_BYTES:
        raise _libc.oserror(errno.EINVAL, f"a device from byte {offset_bytes} on")
    path, device = loop.attach_read_only(file_fd, offset_bytes)
    try:
        fd = mount.fs_context("squashfs", {"source": path, "ro": None}, ATTRIBUTES)
    finally:
        os.close(device)
    try:
        mount.mount_setattr(
            fd,
            "",
            mount.AT_EMPTY_PATH,
            attr_set=mount.MOUNT_ATTR_IDMAP,
            propagation=mount.MS_PRIVATE,
            userns_fd=user_ns,
        )
    except OSError:
        os.close(fd)
        raise
    return fd
