"""Writable layers on the host's disk, for kernels whose tmpfs cannot be an overlay's upper.

tmpfs has user xattrs since Linux 6.6; overlayfs in a user namespace needs them. Where they are
missing a layer is an ext4 of exactly the promised size on a loop device, which only the host's root
can make. The node's launcher gets it as a detached mount whose directories belong to the sandboxes'
own ids: to overlayfs it is then as good as a directory on a local disk, but with a wall around it.

The file behind it never has a name (O_TMPFILE), and the loop device clears itself: both are gone
with the last mount of it, whoever died.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from sandboxd.linux import ext4
from sandboxd.rootfs.overlay import UPPER, WORK

TEMPLATES_MAX: Final = 32
"""Capacities remembered, some 100 KiB each. A node has few in use, but each sandbox on a snapshot
has what its layers have left of it."""

_OWN_INODES: Final = 3
"""UPPER, WORK, and the one that overlayfs makes in WORK."""


class LoopLayers:
    """Makes them. ``directory`` is where the disk space is taken from; ``owner`` the host's id of a
    sandbox's root."""

    def __init__(self, directory: str, owner: int) -> None:
        self._directory = directory
        self._owner = owner
        self._templates: OrderedDict[tuple[int, int], ext4.Template] = OrderedDict()

    def make(self, size_bytes: int, inodes: int) -> int:
        """A fresh layer with room for exactly so much; its mount's descriptor.

        OSError: ENOSPC where the disk has no room for it.
        """
        template = self._template(size_bytes, inodes + _OWN_INODES)
        fd = ext4.mount_copy(template, self._directory)
        try:
            os.rmdir("lost+found", dir_fd=fd)
            # The inode of lost+found is free again, too.
            for number in range(template.surplus_inodes + 1):
                os.mknod(f"{number:x}", 0o600, dir_fd=fd)
            for name, mode in ((UPPER, 0o755), (WORK, 0o700)):
                os.mkdir(name, mode, dir_fd=fd)
                os.chown(name, self._owner, self._owner, dir_fd=fd)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _template(self, size_bytes: int, inodes: int) -> ext4.Template:
        key = (size_bytes, inodes)
        found = self._templates.pop(key, None) or ext4.make_template(size_bytes, inodes)
        self._templates[key] = found
        if len(self._templates) > TEMPLATES_MAX:
            self._templates.popitem(last=False)
        return found
