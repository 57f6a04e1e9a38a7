"""Cursors over bytes: chunks that arrive one after another, or a file in which one can skip.

For the tar reader: exact reads across chunk borders, skipping without copying, and handing out
long runs as views. Not file objects: there is no seeking back and no text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, Protocol

_READ_BYTES: Final = 64 << 10


class Cursor(Protocol):
    """What the tar reader needs of its bytes; short answers mean their end."""

    def read(self, size_bytes: int) -> bytes: ...

    def pieces(self, size_bytes: int) -> Iterator[memoryview]: ...

    def skip(self, size_bytes: int) -> int: ...

    def drain(self) -> None: ...


class ChunkCursor:
    """Reads from an iterator of chunks; short answers mean its end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = b""
        self._view = memoryview(b"")
        self._at = 0

    def _next(self) -> bool:
        for chunk in self._chunks:
            if chunk:
                self._chunk, self._view, self._at = chunk, memoryview(chunk), 0
                return True
        self._chunk, self._view, self._at = b"", memoryview(b""), 0
        return False

    def read(self, size_bytes: int) -> bytes:
        """Exactly `size_bytes`, fewer only at the end. For headers: the caller bounds the size."""
        end = self._at + size_bytes
        if end <= len(self._chunk):
            piece = self._chunk[self._at : end]
            self._at = end
            return piece
        return b"".join(self.pieces(size_bytes))

    def pieces(self, size_bytes: int) -> Iterator[memoryview]:
        """Views that add up to `size_bytes`, fewer only at the end."""
        while size_bytes > 0:
            if self._at >= len(self._chunk) and not self._next():
                return
            piece = self._view[self._at : self._at + size_bytes]
            self._at += len(piece)
            size_bytes -= len(piece)
            yield piece

    def skip(self, size_bytes: int) -> int:
        """Pass over `size_bytes`; returns how many were missing at the end."""
        while size_bytes > 0:
            available = len(self._chunk) - self._at
            if available >= size_bytes:
                self._at += size_bytes
                return 0
            size_bytes -= available
            if not self._next():
                return size_bytes
        return 0

    def drain(self) -> None:
        """Consume the rest, so that whoever hashes the stream has seen all of it."""
        while self._next():
            pass


class FileCursor:
    """Over a file, from its start: skipping costs nothing, and `position` tells where things lie.

    OSError where the file cannot be read.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size_bytes = os.fstat(fd).st_size
        self.position = 0

    def read(self, size_bytes: int) -> bytes:
        """Exactly `size_bytes`, fewer only at the end. For headers: the caller bounds the size."""
        return b"".join(self.pieces(size_bytes))

    def pieces(self, size_bytes: int) -> Iterator[memoryview]:
        """Views that add up to `size_bytes`, fewer only at the end."""
        while size_bytes > 0:
            piece = os.pread(self._fd, min(size_bytes, _READ_BYTES), self.position)
            if not piece:
                return
            self.position += len(piece)
            size_bytes -= len(piece)
            yield memoryview(piece)

    def skip(self, size_bytes: int) -> int:
        """Pass over `size_bytes`; returns how many were missing at the end."""
        step = min(size_bytes, self._size_bytes - self.position)
        self.position += step
        return size_bytes - step

    def drain(self) -> None:
        """Go to the end."""
        self.position = self._size_bytes
