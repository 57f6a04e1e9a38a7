"""A bounded spool of one output stream, shared between who fills it and who reads it.

A memfd: one page of header, then a ring of ``capacity`` bytes. The byte at absolute offset ``i`` of
the stream lies at ``4096 + i % capacity``; the newest ``capacity`` bytes are there.

::

    0    u64  capacity
    8    u64  written    bytes of the stream that can be read
    16   u64  reserved   bytes up to which the ring may be being overwritten; >= written
    24   u64  closed     1 once the stream is at its end: every writer has closed it

One process fills (the spooler), any number read, without a lock. The writer raises ``reserved``
before it touches the ring and ``written`` after it. A reader takes ``written`` first, copies, and
then looks at ``reserved``: what lies before ``reserved - capacity`` by then may have been
overwritten under its hands and does not count. Words are aligned and written whole, and between
them lie system calls.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import Final

HEADER_BYTES: Final = 4096
_CAPACITY, _WRITTEN, _RESERVED, _CLOSED = range(4)


@dataclass(frozen=True, slots=True)
class Piece:
    """``data`` begins at ``offset``: later than was asked for where bytes are lost."""

    offset: int
    data: bytes
    lost_bytes: int
    """Between the offset that was asked for and ``offset``."""


class _Mapped:
    """The header of a spool's memfd, which is owned from here on."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        self.fd = fd
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, HEADER_BYTES, access=access)
        self._words = memoryview(self._map).cast("Q")
        self.capacity = self._words[_CAPACITY]

    @property
    def written(self) -> int:
        return self._words[_WRITTEN]

    @property
    def closed(self) -> bool:
        return bool(self._words[_CLOSED])

    def close(self) -> None:
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


class SpoolWriter(_Mapped):
    """Fills a spool from a pipe or a terminal's master, neither of which blocks."""

    def __init__(self, capacity: int) -> None:
        fd = os.memfd_create("spool", os.MFD_CLOEXEC)
        os.ftruncate(fd, HEADER_BYTES + capacity)
        os.pwrite(fd, capacity.to_bytes(8, "little"), 0)
        super().__init__(fd, writable=True)

    def fill(self, source: int, limit: int, *, is_tty: bool) -> int:
        """Take up to ``limit`` bytes; returns how many, 0 at the end of the stream.

        Raises BlockingIOError where there is nothing now.
        """
        at = self.written
        count = min(limit, self.capacity - at % self.capacity)
        self._words[_RESERVED] = at + count
        moved = 0
        try:
            if is_tty:
                # Not from a pipe, so splice(2) does not take it; and it is slow anyway.
                data = os.read(source, count)
                moved = os.pwrite(self.fd, data, HEADER_BYTES + at % self.capacity)
            else:
                moved = os.splice(
                    source,
                    self.fd,
                    count,
                    offset_dst=HEADER_BYTES + at % self.capacity,
                    flags=os.SPLICE_F_NONBLOCK,
                )
        finally:
            self._words[_WRITTEN] = at + moved
            self._words[_RESERVED] = at + moved
        return moved

    def end(self) -> None:
        self._words[_CLOSED] = 1


class SpoolReader(_Mapped):
    """Reads a spool that somebody else fills."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, writable=False)

    def read(self, offset: int, limit: int) -> Piece:
        """Up to ``limit`` bytes from an absolute offset on, or from the oldest that is kept.

        An offset beyond the end gives nothing, at that offset.
        """
        written = self.written
        start = max(offset, written - self.capacity)
        data = self._copy(start, min(limit, written - start)) if start < written else b""
        overwritten = self._words[_RESERVED] - self.capacity
        if start < overwritten and data:
            cut = min(overwritten - start, len(data))
            data, start = data[cut:], start + cut
        start = max(start, offset)
        return Piece(start, data, start - offset)

    def _copy(self, start: int, count: int) -> bytes:
        at = start % self.capacity
        first = min(count, self.capacity - at)
        data = os.pread(self.fd, first, HEADER_BYTES + at)
        if first < count:
            data += os.pread(self.fd, count - first, HEADER_BYTES)
        return data


def close_all(*spools: _Mapped) -> None:
    """Close each; one that fails does not keep the others open."""
    for spool in spools:
        with contextlib.suppress(OSError, ValueError):
            spool.close()
