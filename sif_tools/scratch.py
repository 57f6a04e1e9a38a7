"""Temporary files without a name: gone when they are closed, whatever happens."""

from __future__ import annotations

import tempfile
from typing import BinaryIO, cast

from sif_tools.errors import ConvertError


def scratch_file(room_for: str) -> BinaryIO:
    """A file in TMPDIR; ConvertError says that it needs room for that."""
    try:
        return cast(BinaryIO, tempfile.TemporaryFile(prefix="sif-tools-"))
    except OSError as error:
        raise ConvertError(
            f"no temporary file can be made: {error.strerror}",
            hint=f"TMPDIR chooses where; it needs room for {room_for}",
        ) from error
