"""The four ways GNU tar spells a sparse file, and its expansion to plain bytes.

old GNU   type S: pairs in the header, continued in blocks after it
PAX 0.0   repeated GNU.sparse.offset / .numbytes records
PAX 0.1   one GNU.sparse.map record
PAX 1.0   decimal lines at the start of the data, padded to a block
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from sif_tools.errors import BadLayer
from sif_tools.tarstream.entry import Piece

BLOCK: Final = 512
# A map is held in memory; GNU tar makes one segment per run of data.
_MAX_SEGMENTS: Final = 1 << 20
_ZEROS: Final = bytes(1 << 20)

Segments = list[tuple[int, int]]
Read = Callable[[int], bytes]


def from_gnu_header(
    block: bytes, read: Read, number: Callable[[bytes], int]
) -> tuple[Segments, int]:
    """Pairs from a type S header and the blocks that continue it; and the file's real size."""
    pairs = [number(block[at : at + 12]) for at in range(386, 482, 12)]
    more = block[482]
    while more:
        extension = read(BLOCK)
        if len(extension) < BLOCK or len(pairs) > 2 * _MAX_SEGMENTS:
            raise BadLayer("a sparse map is broken")
        pairs += [number(extension[at : at + 12]) for at in range(0, 504, 12)]
        more = extension[504]
    return from_numbers(pairs), number(block[483:495])


def from_data(read: Read, stored_bytes: int) -> tuple[Segments, int]:
    """The map at the start of the data (PAX 1.0), and how many of the stored bytes it took."""
    tail, used = b"", 0
    numbers: list[int] = []
    wanted = 1
    while len(numbers) < wanted:
        if used + BLOCK > stored_bytes or len(tail) > BLOCK:
            raise BadLayer("a sparse map is broken")
        *lines, tail = (tail + read(BLOCK)).split(b"\n")
        used += BLOCK
        for line in lines:
            if len(numbers) == wanted:
                break
            numbers.append(_decimal(line))
            if len(numbers) == 1:
                wanted = 1 + 2 * min(numbers[0], _MAX_SEGMENTS + 1)
    return from_numbers(numbers[1:]), used


def from_numbers(numbers: list[int]) -> Segments:
    """Offset, length, offset, length …; empty segments only mark the file's end."""
    if len(numbers) % 2 or len(numbers) > 2 * _MAX_SEGMENTS:
        raise BadLayer("a sparse map is broken")
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [(offset, length) for offset, length in pairs if length]


def check(segments: Segments, real_size: int, stored_bytes: int) -> None:
    """Segments ascend, do not overlap, lie in the file and use what is stored, exactly."""
    end = 0
    for offset, length in segments:
        if length < 0 or offset < end:
            raise BadLayer("a sparse map is broken")
        end = offset + length
    if not end <= real_size < 1 << 62 or sum(length for _, length in segments) != stored_bytes:
        raise BadLayer("a sparse map does not fit its file")


def expand(
    segments: Segments, real_size: int, stored: Callable[[int], Iterator[memoryview]]
) -> Iterator[Piece]:
    """The file's bytes, holes as zeros."""
    at = 0
    for offset, length in segments:
        yield from zeros(offset - at)
        yield from stored(length)
        at = offset + length
    yield from zeros(real_size - at)


def zeros(size_bytes: int) -> Iterator[Piece]:
    """That many zero bytes, in pieces."""
    while size_bytes > 0:
        piece = _ZEROS if size_bytes >= len(_ZEROS) else _ZEROS[:size_bytes]
        size_bytes -= len(piece)
        yield piece


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise BadLayer("a sparse map is broken")
    return int(text)
