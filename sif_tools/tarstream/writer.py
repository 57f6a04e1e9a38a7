"""Write entries as the one PAX stream that the squashfs writer is given.

Plain ustar headers wherever they suffice, an `x` record before them where they do not (long
names, large ids, xattrs). No user and group names: a tool would look them up on this host.
Devices beyond what ustar can say are refused before they come here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from sif_tools.errors import BadEntry
from sif_tools.tarstream.entry import Entry, Kind, Piece

_BLOCK: Final = 512
_FLUSH_BYTES: Final = 1 << 20
# A piece of this size goes out as it is; a smaller one is cheaper to copy than a system call.
_DIRECT_BYTES: Final = 64 << 10
_MAX_OCTAL_7: Final = 0o7777777
_MAX_OCTAL_11: Final = 0o77777777777

_FLAGS: Final = {
    Kind.FILE: b"0",
    Kind.HARDLINK: b"1",
    Kind.SYMLINK: b"2",
    Kind.CHAR_DEVICE: b"3",
    Kind.BLOCK_DEVICE: b"4",
    Kind.DIRECTORY: b"5",
    Kind.FIFO: b"6",
}
_TAIL: Final = bytes(167)


class TarWriter:
    """Writes to an fd; `close` ends the archive. A broken pipe shows as BrokenPipeError."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()
        self._written_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the stream so far, those held back included."""
        return self._written_bytes + len(self._buffer)

    def add(self, path: bytes, entry: Entry, data: Iterable[Piece] = ()) -> None:
        """One entry under `path` (the entry's own path is not looked at) with its content."""
        name = path or b"./"
        size = entry.size_bytes if entry.kind is Kind.FILE else 0
        pax = _pax_records(name, entry, size)
        if pax:
            self._buffer += _block(b"pax", b"x", b"", (0o644, 0, 0, len(pax), 0, 0, 0))
            self._buffer += pax
            self._buffer += bytes(-len(pax) % _BLOCK)
        self._buffer += _block(
            name[:100],
            _FLAGS[entry.kind],
            entry.link_target[:100],
            (
                entry.mode,
                entry.uid if entry.uid <= _MAX_OCTAL_7 else 0,
                entry.gid if entry.gid <= _MAX_OCTAL_7 else 0,
                size if size <= _MAX_OCTAL_11 else 0,
                entry.mtime_s,
                entry.major,
                entry.minor,
            ),
        )
        if size:
            self._write_data(size, data)
        if len(self._buffer) >= _FLUSH_BYTES:
            self._flush()

    def close(self) -> None:
        """The end marker, and whatever is still held back."""
        self._buffer += bytes(2 * _BLOCK)
        self._flush()

    def _write_data(self, size_bytes: int, data: Iterable[Piece]) -> None:
        left = size_bytes
        for piece in data:
            left -= len(piece)
            if left < 0:
                break
            if len(piece) >= _DIRECT_BYTES:
                self._flush()
                self._write(piece)
            else:
                self._buffer += piece
                if len(self._buffer) >= _FLUSH_BYTES:
                    self._flush()
        if left:
            raise BadEntry(f"its content does not have the {size_bytes} bytes it should have")
        self._buffer += bytes(-size_bytes % _BLOCK)

    def _flush(self) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        self._write(buffer)

    def _write(self, data: Piece | bytearray) -> None:
        view = memoryview(data)
        while view:
            count = os.write(self._fd, view)
            self._written_bytes += count
            view = view[count:]


def _block(
    name: bytes, flag: bytes, link: bytes, numbers: tuple[int, int, int, int, int, int, int]
) -> bytes:
    """A ustar header; numbers are mode, uid, gid, size, mtime, major, minor."""
    head = b"%s%07o\0%07o\0%07o\0%011o\0%011o\0" % (name.ljust(100, b"\0"), *numbers[:5])
    rest = b"%s%sustar\x0000%s%07o\0%07o\0%s" % (
        flag,
        link.ljust(100, b"\0"),
        bytes(64),
        *numbers[5:],
        _TAIL,
    )
    return b"%s%06o\0 %s" % (head, sum(head) + sum(rest) + 8 * 0x20, rest)


def _pax_records(name: bytes, entry: Entry, size: int) -> bytes:
    records = []
    if len(name) > 100:
        records.append(_record(b"path", name))
    if len(entry.link_target) > 100:
        records.append(_record(b"linkpath", entry.link_target))
    if entry.uid > _MAX_OCTAL_7:
        records.append(_record(b"uid", b"%d" % entry.uid))
    if entry.gid > _MAX_OCTAL_7:
        records.append(_record(b"gid", b"%d" % entry.gid))
    if size > _MAX_OCTAL_11:
        records.append(_record(b"size", b"%d" % size))
    if entry.xattrs:
        records += [
            _record(b"SCHILY.xattr." + key, value) for key, value in sorted(entry.xattrs.items())
        ]
    return b"".join(records)


def _record(key: bytes, value: bytes) -> bytes:
    """`LENGTH KEY=VALUE\\n`, where LENGTH counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)
