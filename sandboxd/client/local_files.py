"""Files on the client's own side."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

CHUNK_BYTES: Final = 256 * 1024


@contextlib.contextmanager
def replacing(target: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file beside ``target`` that takes its place once the block has ended well."""
    final = Path(target)
    fd, temporary = tempfile.mkstemp(prefix=f".{final.name}.", dir=final.parent)
    try:
        with open(fd, "wb") as file:
            yield file
            os.fchmod(fd, 0o666 & ~_umask())
        os.replace(temporary, final)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    # The only way to read it without setting it, umask(2); other threads may be making files.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
