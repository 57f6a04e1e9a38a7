"""A blob on disk while it arrives: one thread writes it, any number read what is there already.

The file has no name and goes with the spool. Not for verifying: the writer does that, and a
reader is told of a failure as soon as it is known.
"""

from __future__ import annotations

import io
import os
import threading

from sif_tools.errors import ConvertError
from sif_tools.scratch import scratch_file


class Spool:
    """Of known size. `write` from one thread, `reader` from anywhere."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._file = scratch_file("the image's compressed layers")
        self._changed = threading.Condition()
        self._available_bytes = 0
        self._is_complete = False
        self._error: ConvertError | None = None

    def write(self, data: bytes, offset: int, *, shown: bool) -> None:
        """Bytes at a place; a download that starts over writes the same again.

        Those that are not `shown` are read only once the whole is verified.
        """
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise ConvertError(
                f"writing a layer to disk: {error.strerror}",
                hint="TMPDIR chooses where; it needs room for the image's compressed layers",
            ) from error
        if shown:
            with self._changed:
                self._available_bytes = max(self._available_bytes, offset)
                self._changed.notify_all()

    def finish(self) -> None:
        """All is there and verified."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def fail(self, error: ConvertError) -> None:
        """No more will come, unless it is there already."""
        with self._changed:
            if not self._is_complete and self._error is None:
                self._error = error
                self._changed.notify_all()

    def reader(self) -> SpoolReader:
        """From the start; waits for what has not arrived yet."""
        return SpoolReader(self)

    def close(self) -> None:
        self._file.close()

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Some bytes at a place, none at the end. Raises what the writer failed with.

        The last byte is only given out once the whole is verified.
        """
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                end = self.size_bytes
                if not self._is_complete:
                    end = min(self._available_bytes, self.size_bytes - 1)
                if self._is_complete or offset < end:
                    break
                self._changed.wait()
        return os.pread(self._file.fileno(), min(size_bytes, max(0, end - offset)), offset)


class SpoolReader(io.RawIOBase):
    """A file object over a spool."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._at = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            pieces = []
            while piece := self.read(1 << 20):
                pieces.append(piece)
            return b"".join(pieces)
        data = self._spool.read(self._at, size) if size else b""
        self._at += len(data)
        return data
