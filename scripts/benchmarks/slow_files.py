"""A file system of one file whose every read takes a while: storage that is far away.

    python -m benchmarks.slow_files FILE DIRECTORY LATENCY_MS

Mounts at DIRECTORY a read-only file of FILE's name with FILE's content, prints ``ready``, and
serves until its standard input ends. Each request of the kernel's (128 KiB at most) waits for so
long before it is answered, side by side with others, as those of a network's file system do.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio

FILE_INODE = pyfuse3.ROOT_INODE + 1


class SlowFile(pyfuse3.Operations):
    """The directory, and the file in it."""

    def __init__(self, file: Path, latency_s: float) -> None:
        super().__init__()
        self._name = file.name.encode()
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._latency_s = latency_s

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any = None) -> Any:
        if parent_inode != pyfuse3.ROOT_INODE or name != self._name:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(FILE_INODE, ctx)

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        del ctx
        found = pyfuse3.EntryAttributes()
        found.st_ino = inode
        is_file = inode == FILE_INODE
        found.st_mode = stat.S_IFREG | 0o444 if is_file else stat.S_IFDIR | 0o555
        found.st_size = os.fstat(self._fd).st_size if is_file else 0
        found.entry_timeout = found.attr_timeout = 3600.0
        return found

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        del flags, ctx
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        del fh
        await trio.sleep(self._latency_s)
        return os.pread(self._fd, size, off)


def main() -> None:
    file, directory, latency_ms = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    options = {"fsname=slow", "ro", "allow_other", "default_permissions"}
    pyfuse3.init(SlowFile(file, latency_ms / 1000), directory, options)
    try:
        trio.run(_serve)
    finally:
        pyfuse3.close()


async def _serve() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        print("ready", flush=True)
        await trio.to_thread.run_sync(sys.stdin.buffer.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    main()
