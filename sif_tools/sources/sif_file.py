"""`sif:FILE`: a SIF, to be packed anew (with another compression, or without what is broken).

The primary squashfs is turned into a tar by `sqfs2tar`, which keeps ids, modes, times, device
numbers, extended attributes, hard links and odd names exactly; `unsquashfs` cannot write a tar
before squashfs-tools 4.6 and drops to files in between, which needs root. It can read only a whole
file, so the partition is copied first: compressed as it is, into a file without a name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from sif_tools.copying import copy_range
from sif_tools.errors import (
    BadSource,
    ConvertError,
    NoMatchingPlatform,
    SquashfsToolFailed,
    ToolMissing,
)
from sif_tools.format import DataType, PartType
from sif_tools.image_config import OCI_CONFIG_NAME, image_config
from sif_tools.limits import Limits
from sif_tools.merge.merger import Pass, Progress
from sif_tools.partition import Partition, squashfs_partition
from sif_tools.prefetch import Prefetch
from sif_tools.reader import Sif, opened, read_sif
from sif_tools.scratch import scratch_file
from sif_tools.sources.source import Request, Source
from sif_tools.tarstream.entry import EntryStream
from sif_tools.tarstream.reader import TarReader

_TOOL: Final = "sqfs2tar"
_PACKAGE: Final = "squashfs-tools-ng"
_CHUNK_BYTES: Final = 512 << 10
_COPY_STEP_BYTES: Final = 8 << 20
# A socket without the process behind it is nothing; all else that is left out is an error.
_HARMLESS: Final = re.compile(rb"WARNING: .*: cannot pack socket|Skipping .*|")


def open_sif(request: Request, resources: ExitStack) -> Source:
    """Implements `Backend`."""
    path = Path(request.reference)
    fd = resources.enter_context(opened(path))
    sif = read_sif(fd)
    partition = squashfs_partition(sif, fd)
    if any(one.is_partition and one.part_type == PartType.OVERLAY for one in sif.descriptors):
        raise BadSource(f"{path}: has overlay partitions, which would be lost")
    if partition.arch != request.architecture:
        raise NoMatchingPlatform(
            f"{path} is made for {partition.arch}, not for {request.architecture}",
            hint="choose its architecture with --arch",
        )
    squashfs = resources.enter_context(copy_partition(fd, partition))
    return Source(
        "sif",
        [SquashfsLayer(squashfs, request.options.limits)],
        image_config(sif, fd),
        partition.arch,
        None,
        has_config=_has_config(sif),
        resources=resources,
    )


def _has_config(sif: Sif) -> bool:
    return sif.named(OCI_CONFIG_NAME, DataType.JSON) is not None


@contextmanager
def copy_partition(fd: int, partition: Partition) -> Iterator[BinaryIO]:
    """A file without a name that holds the squashfs and nothing else."""
    with scratch_file("the squashfs of the SIF") as squashfs:
        _copy(fd, squashfs, partition.offset_bytes, partition.size_bytes)
        yield squashfs


def _copy(fd: int, target: BinaryIO, offset_bytes: int, size_bytes: int) -> None:
    done = 0
    try:
        while done < size_bytes:
            step = min(_COPY_STEP_BYTES, size_bytes - done)
            count = copy_range(fd, target.fileno(), step, offset_bytes + done, done)
            if count == 0:
                raise BadSource("the SIF became shorter while it was read")
            done += count
    except OSError as error:
        raise ConvertError(f"copying the squashfs: {error.strerror}") from error


class SquashfsLayer:
    """A squashfs as a `Layer`. Progress counts the bytes of the tar in between."""

    name = "the SIF's squashfs"
    has_whiteouts = False

    def __init__(self, squashfs: BinaryIO, limits: Limits) -> None:
        self._squashfs = squashfs
        self._limits = limits
        self.size_bytes = 0

    @contextmanager
    def open(self, which: Pass, progress: Progress | None = None) -> Iterator[EntryStream]:
        """One pass: the tool is run once for each."""
        with scratch_file("messages") as errors, self._running(errors) as process:
            with Prefetch(self._chunks(process, progress)) as chunks:
                reader = TarReader(chunks)
                yield reader
                reader.drain()
            status = process.wait()
            errors.seek(0)
            said = errors.read(1 << 20).split(b"\n")
            wrong = [line for line in said if not _HARMLESS.fullmatch(line)]
            if status != 0 or wrong:
                text = b" / ".join(wrong)[:1000].decode("utf-8", "replace")
                raise SquashfsToolFailed(f"{_TOOL} ended with {status}: {text or 'no words'}")

    @contextmanager
    def _running(self, errors: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
        tool = shutil.which(_TOOL)
        if tool is None:
            raise ToolMissing(f"{_TOOL} is not on PATH", hint=f"install the package {_PACKAGE}")
        fd = self._squashfs.fileno()
        # "." keeps the root directory's own attributes, which are lost otherwise.
        command = [tool, "--root-becomes", ".", f"/proc/self/fd/{fd}"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[fd],
            env=os.environ | {"LC_ALL": "C"},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _chunks(
        self, process: subprocess.Popen[bytes], progress: Progress | None
    ) -> Iterator[bytes]:
        if process.stdout is None:
            raise AssertionError("started with a pipe")
        stored_bytes = os.fstat(self._squashfs.fileno()).st_size
        done = 0
        while chunk := process.stdout.read(_CHUNK_BYTES):
            done += len(chunk)
            self._limits.check_inflated(done, stored_bytes)
            yield chunk
            if progress is not None:
                progress(done)
        self.size_bytes = done
