"""Small ext4 file systems of an exact capacity, for writable layers on loop devices.

``mkfs.ext4`` makes one a capacity into memory, a *template*: the few hundred KiB that are not zero.
A layer is a copy of those in a sparse or preallocated file, which takes well under a millisecond.

No journal: a layer is never looked at after a crash. No checksums: then the superblock can be
changed by hand, in which the exact number of blocks held back and each copy's own UUID are written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import uuid
from dataclasses import dataclass
from typing import Final

from sandboxd.linux import _libc, loop, mount, programs

BLOCK_BYTES: Final = 4096
INODE_BYTES: Final = 256

# struct ext4_super_block, from byte 1024 on (Documentation/filesystems/ext4/super.rst)
_SUPERBLOCK: Final = 1024
_BLOCKS_COUNT: Final = _SUPERBLOCK + 0x04
_R_BLOCKS_COUNT: Final = _SUPERBLOCK + 0x08
_FREE_BLOCKS_COUNT: Final = _SUPERBLOCK + 0x0C
_FREE_INODES_COUNT: Final = _SUPERBLOCK + 0x10
_UUID: Final = _SUPERBLOCK + 0x68

_fallocate = _libc.function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_FEATURES: Final = "^has_journal,^metadata_csum,^uninit_bg,^resize_inode,^64bit"
_NAMES_PER_BLOCK: Final = 200
"""Of at most 12 bytes (struct ext4_dir_entry_2: 8 bytes and the name)."""
DIRECTORIES: Final = 3
_LOST_AND_FOUND_BLOCKS: Final = 4
MKFS_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Template:
    """A file system that nothing was written to."""

    size_bytes: int
    extents: tuple[tuple[int, bytes], ...]
    """Offset and content of what is not zero."""
    surplus_inodes: int
    """More than were asked for: inodes come by whole blocks of every group."""


def make_template(capacity_bytes: int, inodes: int) -> Template:
    """A file system in which ``capacity_bytes`` can be allocated by those who are not the host's
    root, and at least ``inodes`` made, once ``lost+found`` is removed. Not counted are the first
    block of ``DIRECTORIES`` directories, and the names of ``surplus_inodes`` empty files in the
    root.

    OSError where there is no mkfs.ext4, or it fails.
    """
    program = programs.find_program("mkfs.ext4")
    if program is None:
        raise _libc.oserror(errno.ENOENT, f"mkfs.ext4 ({programs.remedy('mkfs.ext4')})")
    capacity = -(-capacity_bytes // BLOCK_BYTES)
    # Beside the capacity: inode tables, what the kernel keeps for itself, and per group of 32,768
    # blocks its bitmaps; more than enough, since the rest is held back exactly below.
    blocks = capacity + inodes * INODE_BYTES // BLOCK_BYTES + 4 * (capacity // 32_768) + 256
    blocks += kept_by_kernel(2 * blocks) + blocks // 64
    image = os.memfd_create("ext4", os.MFD_CLOEXEC)
    try:
        os.ftruncate(image, blocks * BLOCK_BYTES)
        command = [str(program), "-q", "-F", "-b", str(BLOCK_BYTES), "-I", str(INODE_BYTES)]
        command += ["-m", "0", "-N", str(inodes + 32), "-O", _FEATURES]
        try:
            done = subprocess.run(
                [*command, f"/proc/self/fd/{image}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=(image,),
                timeout=MKFS_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _libc.oserror(errno.ETIMEDOUT, str(program)) from None
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()
            raise OSError(errno.EIO, f"status {done.returncode}: {said}", str(program))
        surplus = _number(image, _FREE_INODES_COUNT) - inodes
        _hold_back(
            image,
            capacity + DIRECTORIES + surplus // _NAMES_PER_BLOCK - _LOST_AND_FOUND_BLOCKS,
        )
        return Template(blocks * BLOCK_BYTES, tuple(_data(image)), surplus)
    finally:
        os.close(image)


def kept_by_kernel(blocks: int) -> int:
    """``ext4_set_resv_clusters``: 2 %, at most 4,096, for its own use when the disk is full."""
    return min(blocks // 50, 4096)


def _hold_back(image: int, capacity: int) -> None:
    """Write how many blocks are for root alone, so that ``capacity`` are left for the others."""
    total, free = _number(image, _BLOCKS_COUNT), _number(image, _FREE_BLOCKS_COUNT)
    held_back = free - kept_by_kernel(total) - capacity
    if held_back < 0:
        raise _libc.oserror(errno.ENOSPC, f"an ext4 of {total} blocks has no {capacity} for files")
    os.pwrite(image, struct.pack("<I", held_back), _R_BLOCKS_COUNT)


def _number(image: int, at: int) -> int:
    number: int = struct.unpack("<I", os.pread(image, 4, at))[0]
    return number


def _data(image: int) -> list[tuple[int, bytes]]:
    extents: list[tuple[int, bytes]] = []
    at, end = 0, os.fstat(image).st_size
    while at < end:
        try:
            at = os.lseek(image, at, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole to the end
            break
        hole = os.lseek(image, at, os.SEEK_HOLE)
        # A memfd's huge page holds much that is zero.
        for block_at in range(at, hole, BLOCK_BYTES):
            block = os.pread(image, BLOCK_BYTES, block_at)
            if block.strip(b"\0"):
                if extents and extents[-1][0] + len(extents[-1][1]) == block_at:
                    extents[-1] = (extents[-1][0], extents[-1][1] + block)
                else:
                    extents.append((block_at, block))
        at = hole
    return extents


def write_copy(template: Template, file_fd: int) -> None:
    """Make a copy in an empty file, whose blocks are allocated now where the file system can: a
    layer that has room for what was promised must not find the host's disk full (ENOSPC is raised
    here instead)."""
    room = os.fstatvfs(file_fd)
    if room.f_bavail * room.f_frsize < template.size_bytes:
        # Asked first: the attempt alone would take all there is from everybody for a moment.
        raise _libc.oserror(errno.ENOSPC, f"{template.size_bytes} bytes for a file system")
    os.ftruncate(file_fd, template.size_bytes)
    try:
        # Not os.posix_fallocate: where the file system cannot, that writes every block.
        _fallocate("fallocate", file_fd, 0, 0, template.size_bytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    for offset, data in template.extents:
        os.pwrite(file_fd, data, offset)
    # Two of one UUID would be taken for the same by overlayfs.
    os.pwrite(file_fd, uuid.uuid4().bytes, _UUID)


def mount_copy(template: Template, directory: str) -> int:
    """A new file system from a template, its file below ``directory`` and without a name there.

    Returns its detached mount's descriptor: file and loop device go with its last user. Needs the
    host's root.
    """
    file_fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        write_copy(template, file_fd)
        path, device = loop.attach(file_fd)
    finally:
        os.close(file_fd)
    try:
        attr = mount.MOUNT_ATTR_NOSUID | mount.MOUNT_ATTR_NODEV | mount.MOUNT_ATTR_NOATIME
        return mount.fs_context("ext4", {"source": path, "nobarrier": None}, attr)
    finally:
        os.close(device)
