"""Make a squashfs from a tar stream, through `tar2sqfs`.

Chosen over sqfstar and mksquashfs because it takes numeric ids as they are, resolves hard links,
honours the root entry and can be given a zstd level. It does not forgive duplicates or lost link
targets, which the merge never emits. Its output does not depend on the number of its workers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO, Final

from sif_tools.errors import BadSquashfs, ConvertError, SquashfsToolFailed, ToolMissing
from sif_tools.readers import check_readable
from sif_tools.scratch import scratch_file
from sif_tools.superblock import read_superblock
from sif_tools.tarstream.writer import TarWriter

TOOL: Final = "tar2sqfs"
_PACKAGE: Final = "squashfs-tools-ng"
_PIPE_BYTES: Final = 1 << 20
_MAX_STDERR_BYTES: Final = 4096


class Compression(StrEnum):
    """Low zstd is as small as gzip here and many times faster; gzip is for old readers.

    lz4 is larger and the cheapest to read, xz the smallest and by far the dearest. Of lz4 images
    whose files all have one owner, unsquashfs (4.5.1) says that they are corrupt: tar2sqfs stores
    a table of 4 bytes as 5. The kernel, squashfuse and rdsquashfs read them.
    """

    ZSTD = "zstd"
    GZIP = "gzip"
    LZ4 = "lz4"
    XZ = "xz"


# Least, most, default. lz4 has no levels but two modes: 1 is the fast one, 2 the thorough.
_LEVELS: Final = {
    Compression.ZSTD: (1, 22, 3),
    Compression.GZIP: (1, 9, 9),
    Compression.LZ4: (1, 2, 1),
    Compression.XZ: (0, 9, 6),
}
# What squashfs allows (kernel: SQUASHFS_FILE_MAX_SIZE).
_MIN_BLOCK_BYTES: Final = 4 << 10
_MAX_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SquashfsOptions:
    """`level` None is the compressor's default here: 3 for zstd, 9 for gzip, 1 for lz4, 6 for xz.

    `readers`: the compressions that all who will read it can; None asks this host's reader.
    """

    compression: Compression = Compression.ZSTD
    level: int | None = None
    block_size_bytes: int = 128 << 10
    readers: frozenset[str] | None = None

    def check(self) -> None:
        """ConvertError for what cannot be made; CannotBeRead for what nobody could read."""
        self.checked_level()
        size = self.block_size_bytes
        if not _MIN_BLOCK_BYTES <= size <= _MAX_BLOCK_BYTES or size & (size - 1):
            raise ConvertError(
                f"block size {size}, expected a power of two from {_MIN_BLOCK_BYTES} to "
                f"{_MAX_BLOCK_BYTES}"
            )
        check_readable(self.compression, self.readers)

    def checked_level(self) -> int:
        """The level to use; ConvertError for one that the compressor does not have."""
        least, most, default = _LEVELS[self.compression]
        level = default if self.level is None else self.level
        if not least <= level <= most:
            raise ConvertError(f"{self.compression} level {level}, expected {least} to {most}")
        return level

    def tool_options(self) -> list[str]:
        """The level as tar2sqfs is told it."""
        level = self.checked_level()
        if self.compression is Compression.LZ4:
            return ["--comp-extra=hc"] if level == 2 else []
        return [f"--comp-extra=level={level}"]


def find_tool() -> str:
    """Where tar2sqfs is; ToolMissing with the package that brings it."""
    path = shutil.which(TOOL)
    if path is None:
        raise ToolMissing(f"{TOOL} is not on PATH", hint=f"install the package {_PACKAGE}")
    return path


@contextmanager
def squashfs_from_tar(
    write: Callable[[TarWriter], int], options: SquashfsOptions
) -> Iterator[tuple[BinaryIO, int]]:
    """A temporary squashfs of what `write` writes: its open file and its size in bytes.

    `write` returns the number of inodes that the file system must then have, so an entry that
    the tool left out is an error. The file has no name and is gone when it is closed, whatever
    happens; the tool is killed if `write` raises.
    """
    options.check()
    with ExitStack() as stack:
        image = stack.enter_context(scratch_file("the finished squashfs"))
        errors = stack.enter_context(scratch_file("the finished squashfs"))
        with _running(image, errors, options) as process:
            inodes = _feed(process, write, errors)
        size = os.fstat(image.fileno()).st_size
        try:
            found = read_superblock(image.fileno(), 0, size).inodes
        except BadSquashfs as error:
            raise SquashfsToolFailed(f"{TOOL} made no squashfs: {error.message}") from error
        if found != inodes:
            raise SquashfsToolFailed(f"{TOOL} stored {found} of {inodes} inodes")
        yield image, size


@contextmanager
def _running(
    image: BinaryIO, errors: BinaryIO, options: SquashfsOptions
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        find_tool(),
        "--quiet",
        "--force",
        "--no-skip",  # an entry it cannot take ends the conversion instead of being left out
        f"--compressor={options.compression}",
        *options.tool_options(),
        f"--block-size={options.block_size_bytes}",
        "--defaults=uid=0,gid=0,mode=0755,mtime=0",  # mtime is the superblock's, too
        # Opened anew by name, which works for a file without one and keeps it so.
        f"/proc/self/fd/{image.fileno()}",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[image.fileno()],
            env=environment | {"LC_ALL": "C"},
        )
    except OSError as error:
        raise SquashfsToolFailed(f"{TOOL} cannot be started: {error.strerror}") from error
    try:
        yield process
    finally:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if process.poll() is None:
            process.kill()
        process.wait()


def _feed(
    process: subprocess.Popen[bytes], write: Callable[[TarWriter], int], errors: BinaryIO
) -> int:
    """Write the stream, end it, wait for the tool; returns what `write` returned."""
    if process.stdin is None:
        raise AssertionError("started with a pipe")
    fd = process.stdin.fileno()
    with suppress(OSError):  # a user's pipes may be limited; it only costs speed
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        writer = TarWriter(fd)
        inodes = write(writer)
        writer.close()
        process.stdin.close()
    except BrokenPipeError:
        process.wait()
        raise _failure(process, errors) from None
    if process.wait() != 0:
        raise _failure(process, errors)
    return inodes


def _failure(process: subprocess.Popen[bytes], errors: BinaryIO) -> SquashfsToolFailed:
    end = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, end - _MAX_STDERR_BYTES))
    said = " / ".join(errors.read().decode("utf-8", "replace").split("\n")).strip(" /")
    how = f"signal {-process.returncode}" if process.returncode < 0 else process.returncode
    return SquashfsToolFailed(f"{TOOL} ended with {how}: {said or 'it said nothing'}")
