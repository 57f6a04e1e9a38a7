"""Which compressions those who will read an image can read: found out by letting them try.

A version number does not say it (0.1.105 says it is 0.1.104), and builds differ in what they were
linked with. `squashfuse_ll` opens the image before it looks at its FUSE options, so with an option
that nobody knows it refuses the image or the option, and never mounts: no privilege is needed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from sif_tools.errors import CannotBeRead, ConvertError

READER: Final = "squashfuse_ll"
_NO_OPTION: Final = "sif_tools_no_such_option"
_TIMEOUT_S: Final = 10
_MAGIC: Final = b"hsqs"
# The end of an empty archive: the smallest thing that the squashfs writer turns into an image.
_EMPTY_TAR: Final = bytes(1024)


def check_readable(compression: str, readers: Collection[str] | None) -> None:
    """CannotBeRead unless every reader can read this compression.

    `readers` names what they all can; None asks the reader of this host, and nobody where it has
    none: a machine that only converts need not be able to mount.
    """
    if readers is not None:
        if compression not in readers:
            raise CannotBeRead(
                f"the readers cannot read {compression}, only {', '.join(sorted(readers))}",
                hint="choose one of these with --compression",
            )
        return
    reader, writer = shutil.which(READER), shutil.which("tar2sqfs")
    if reader is not None and writer is not None and not can_read(reader, writer, compression):
        raise CannotBeRead(
            f"{reader} cannot read {compression}",
            hint="choose another --compression, or say with --for-readers what they can read",
        )


def can_read(reader: str, writer: str, compression: str) -> bool:
    """Let one reader open the smallest image of one compression."""
    try:
        with tempfile.TemporaryDirectory(prefix="sif-tools-") as scratch:
            image = Path(scratch, "image")
            mountpoint = Path(scratch, "mountpoint")
            mountpoint.mkdir()
            return not _is_made(writer, compression, image) or _opens(reader, image, mountpoint)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConvertError(
            f"trying what {reader} can read: {error}", hint="TMPDIR chooses where that is tried"
        ) from error


def _is_made(writer: str, compression: str, image: Path) -> bool:
    """False where the writer does not work at all, which the conversion itself tells better."""
    ended = subprocess.run(
        [writer, "--quiet", f"--compressor={compression}", image],
        input=_EMPTY_TAR,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return ended.returncode == 0 and image.exists() and image.read_bytes()[:4] == _MAGIC


def _opens(reader: str, image: Path, mountpoint: Path) -> bool:
    try:
        ended = subprocess.run(
            [reader, "-f", "-o", _NO_OPTION, image, mountpoint],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # It took the option and mounted; it was killed, its mount is left.
        with suppress(OSError):
            subprocess.run(["fusermount3", "-u", mountpoint], capture_output=True, check=False)
        raise
    return _NO_OPTION.encode() in ended.stderr
