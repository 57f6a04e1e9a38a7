"""Sniff a layer's compression and decompress it as a stream of bounded chunks.

The media type is not consulted: registries hold gzip layers labelled zstd and plain tars labelled
gzip. Understood are gzip (any number of members), zstd (any number of frames, skippable ones
included) and no compression. Memory stays bounded whatever the ratio.

A stream that is cut short, damaged or followed by something else is always an error, though only
as far as its own checksums reach; a layer's diff_id covers the rest.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import zstandard

from sif_tools.errors import BadLayer, UnsupportedCompression
from sif_tools.zstd_frames import FrameWalker

_inflate: ModuleType
try:
    # The same interface, three times the speed; inflating is half of what a conversion costs.
    from isal import isal_zlib as _inflate
except ImportError:  # no wheel for this machine
    _inflate = zlib

_INFLATE_ERRORS: Final[tuple[type[Exception], ...]] = (zlib.error, _inflate.error)

CHUNK_BYTES: Final = 512 << 10
_READ_BYTES: Final = 256 << 10

Read = Callable[[int], bytes]

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
# 0x184D2A50 to 0x184D2A5F, little-endian: frames that carry data for others.
_ZSTD_SKIPPABLE: Final = b"\x2a\x4d\x18"
_KNOWN_OTHERS: Final = {b"\xfd7zXZ\0": "xz", b"BZh": "bzip2", b"\x04\x22\x4d\x18": "lz4"}


def decompressed(read: Read) -> Iterator[bytes]:
    """The plain bytes of what `read` delivers; BadLayer or UnsupportedCompression otherwise."""
    start = read(_READ_BYTES)
    if start.startswith(_GZIP):
        return _gunzip(start, read)
    if start.startswith(_ZSTD) or (start[1:4] == _ZSTD_SKIPPABLE and start[0] & 0xF0 == 0x50):
        return _unzstd(start, read)
    for magic, name in _KNOWN_OTHERS.items():
        if start.startswith(magic):
            raise UnsupportedCompression(f"the layer is compressed with {name}, not gzip or zstd")
    return _plain(start, read)


def _plain(start: bytes, read: Read) -> Iterator[bytes]:
    piece = start
    while piece:
        yield piece
        piece = read(CHUNK_BYTES)


def _gunzip(start: bytes, read: Read) -> Iterator[bytes]:
    pending = start
    while True:
        member: Any = _inflate.decompressobj(wbits=31)
        try:
            while not member.eof:
                pending = pending or read(_READ_BYTES)
                # Without input this still delivers what zlib holds back of the last one.
                plain = member.decompress(pending, CHUNK_BYTES)
                if not pending and not plain and not member.eof:
                    raise BadLayer("the gzip stream ends too early")
                pending = member.unconsumed_tail
                if plain:
                    yield plain
        except _INFLATE_ERRORS as error:
            raise BadLayer(f"the gzip stream is broken: {error}") from error
        pending = member.unused_data or read(_READ_BYTES)
        if not pending.startswith(_GZIP[: len(pending)]):
            _check_padding(pending, read)
            return
        if not pending:
            return


def _check_padding(pending: bytes, read: Read) -> None:
    """Zeros after the last member are padding to a block; anything else is not ours to ignore."""
    while pending:
        if pending.strip(b"\0"):
            raise BadLayer("the gzip stream is followed by something that is not gzip")
        pending = read(_READ_BYTES)


class _Resumed:
    """A `read` with what the sniffing took put back in front; frames are followed on the way."""

    def __init__(self, start: bytes, read: Read) -> None:
        self._start = start
        self._read = read
        self.frames = FrameWalker()

    def read(self, size: int = -1) -> bytes:
        if self._start:
            data, self._start = self._start, b""
        else:
            data = self._read(size if size > 0 else _READ_BYTES)
        self.frames.feed(data)
        return data


def _unzstd(start: bytes, read: Read) -> Iterator[bytes]:
    source = _Resumed(start, read)
    # The default window limit (128 MiB) stands: more would let a layer choose our memory.
    reader = zstandard.ZstdDecompressor().stream_reader(
        source,  # type: ignore[arg-type]
        read_size=_READ_BYTES,
        read_across_frames=True,
    )
    try:
        while plain := reader.read(CHUNK_BYTES):
            yield plain
    except zstandard.ZstdError as error:
        raise BadLayer(f"the zstd stream is broken: {error}") from error
    # The library takes the end of its input for the end of the data.
    if not source.frames.at_end:
        raise BadLayer("the zstd stream ends too early")
