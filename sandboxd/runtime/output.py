"""What is kept of an output stream, and what is only counted.

Memory is at most the cap, however the writer slices its bytes: kept bytes live in flat bytearrays,
never in a list of chunks (a program that writes single bytes would make each cost fifty).
"""

from __future__ import annotations

from sandboxd.model import StreamResult, Truncate


class Capture:
    """Takes a stream in pieces and keeps its head, its tail or both ends, ``cap`` bytes in all.

    With ``Truncate.BOTH`` the first ``cap - cap // 2`` and the last ``cap // 2`` bytes are kept.
    """

    __slots__ = ("_head", "_head_cap", "_tail", "_tail_at", "_tail_cap", "total_bytes")

    def __init__(self, cap: int, truncate: Truncate) -> None:
        if truncate is Truncate.HEAD:
            self._tail_cap = 0
        elif truncate is Truncate.TAIL:
            self._tail_cap = cap
        else:
            self._tail_cap = cap // 2
        self._head_cap = cap - self._tail_cap
        self._head = bytearray()
        # A ring once it is full: the oldest byte is at _tail_at.
        self._tail = bytearray()
        self._tail_at = 0
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            if len(data) <= room:
                return
            data = data[room:]
        if self._tail_cap:
            self._feed_tail(data)

    def _feed_tail(self, data: bytes) -> None:
        cap = self._tail_cap
        if len(data) >= cap:
            self._tail[:] = data[len(data) - cap :]
            self._tail_at = 0
            return
        room = cap - len(self._tail)
        if room:
            self._tail += data[:room]
            data = data[room:]
        first = min(len(data), cap - self._tail_at)
        self._tail[self._tail_at : self._tail_at + first] = data[:first]
        rest = len(data) - first
        if rest:
            self._tail[:rest] = data[first:]
            self._tail_at = rest
        else:
            self._tail_at = (self._tail_at + first) % cap

    def result(self) -> StreamResult:
        at = self._tail_at
        # What was taken is one copy at the end, not two: a cap may be many mebibytes.
        data = b"".join((self._head, memoryview(self._tail)[at:], memoryview(self._tail)[:at]))
        return StreamResult(data, self.total_bytes, self.total_bytes > len(data))
