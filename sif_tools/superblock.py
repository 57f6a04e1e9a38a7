"""The squashfs superblock: what can be checked of a file system without parsing its inside.

Layout as in the kernel's fs/squashfs/squashfs_fs.h (version 4.0, little-endian)::

     0 magic "hsqs"    16 fragments u32      26 ids u16       40 bytes used u64
     4 inodes u32      20 compression u16    28 major u16     48 starts of the tables of ids,
     8 mtime u32       22 block log u16      30 minor u16        xattrs, inodes, directories,
    12 block size u32  24 flags u16          32 root u64         fragments, exports: u64 each
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from sif_tools.errors import BadSquashfs
from sif_tools.reader import pread

_SUPERBLOCK: Final = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_MAGIC: Final = b"hsqs"
_ABSENT: Final = 0xFFFFFFFFFFFFFFFF
_COMPRESSIONS: Final = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
_MIN_BLOCK_LOG: Final = 12
_MAX_BLOCK_LOG: Final = 20


@dataclass(frozen=True, slots=True)
class Superblock:
    """A superblock that passed every check."""

    compression: str
    block_size_bytes: int
    bytes_used: int
    inodes: int


def read_superblock(fd: int, offset_bytes: int, size_bytes: int) -> Superblock:
    """Read and check the superblock of a squashfs in a range of a file; BadSquashfs if not sane."""
    raw = pread(fd, _SUPERBLOCK.size, offset_bytes)
    if len(raw) < _SUPERBLOCK.size:
        raise BadSquashfs("squashfs ends past the end of the file")
    fields = _SUPERBLOCK.unpack(raw)
    magic, inodes, _mtime, block_size, _fragments, compression, block_log = fields[:7]
    _flags, ids, major, minor, _root, bytes_used, *tables = fields[7:]
    if magic != _MAGIC:
        raise BadSquashfs("partition has no squashfs magic")
    if (major, minor) != (4, 0):
        raise BadSquashfs(f"squashfs version {major}.{minor}, only 4.0 is known")
    if not _MIN_BLOCK_LOG <= block_log <= _MAX_BLOCK_LOG or block_size != 1 << block_log:
        raise BadSquashfs(f"squashfs block size {block_size} (log {block_log})")
    if compression not in _COMPRESSIONS:
        raise BadSquashfs(f"squashfs compression id {compression} is not known")
    if not _SUPERBLOCK.size <= bytes_used <= size_bytes:
        raise BadSquashfs(f"squashfs uses {bytes_used} bytes of a partition of {size_bytes}")
    if inodes == 0 or ids == 0:
        raise BadSquashfs("squashfs without inodes or ids")
    for start in tables:
        if start != _ABSENT and not _SUPERBLOCK.size <= start <= bytes_used:
            raise BadSquashfs(f"squashfs table at {start}, outside its {bytes_used} bytes")
    return Superblock(_COMPRESSIONS[compression], block_size, bytes_used, inodes)
