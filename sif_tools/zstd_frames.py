"""Follow the frames of a zstd stream, to tell whether it ends where a frame ends (RFC 8878).

    frame      magic u32 | descriptor u8 | window u8 | dictionary id | content size | blocks | hash
    descriptor bits 7-6 size of content size, 5 single segment (no window), 2 hash, 1-0 dictionary
    block      u24: bit 0 last, bits 2-1 type (0 raw, 1 one byte repeated, 2 compressed), rest size
    skippable  0x184D2A5? u32 | size u32 | bytes

Reads headers only. Not for checking anything else: the decompressor does that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_MAGIC: Final = 0xFD2FB528
_SKIPPABLE: Final = 0x184D2A50
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)
_CONTENT_BYTES: Final = (0, 2, 4, 8)
_REPEATED: Final = 1


class FrameWalker:
    """Fed with the stream piece by piece; `at_end` tells whether it could end here.

    What is no frame at all is passed over: the decompressor refuses it.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._wanted = 4
        self._skip_bytes = 0
        self._step: Callable[[int], None] = self._magic
        self._has_hash = False

    @property
    def at_end(self) -> bool:
        return self._step == self._magic and not self._held and not self._skip_bytes

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream."""
        at = 0
        while at < len(data):
            if self._skip_bytes:
                count = min(self._skip_bytes, len(data) - at)
                self._skip_bytes -= count
            else:
                count = min(self._wanted - len(self._held), len(data) - at)
                self._held += data[at : at + count]
                if len(self._held) == self._wanted:
                    value = int.from_bytes(self._held, "little")
                    self._held.clear()
                    self._step(value)
            at += count

    def _expect(self, step: Callable[[int], None], wanted: int) -> None:
        self._step, self._wanted = step, wanted

    def _magic(self, value: int) -> None:
        if value == _MAGIC:
            self._expect(self._descriptor, 1)
        elif value & 0xFFFFFFF0 == _SKIPPABLE:
            self._expect(self._skippable, 4)
        else:
            self._expect(self._nothing, 1)

    def _nothing(self, value: int) -> None:
        """Not a frame: there is no end in this."""

    def _skippable(self, size_bytes: int) -> None:
        self._skip_bytes = size_bytes
        self._expect(self._magic, 4)

    def _descriptor(self, value: int) -> None:
        single, self._has_hash = bool(value & 0x20), bool(value & 0x04)
        content = _CONTENT_BYTES[value >> 6] or int(single)
        self._skip_bytes = (not single) + _DICTIONARY_BYTES[value & 3] + content
        self._expect(self._block, 3)

    def _block(self, value: int) -> None:
        self._skip_bytes = 1 if value >> 1 & 3 == _REPEATED else value >> 3
        if value & 1:
            self._skip_bytes += 4 * self._has_hash
            self._expect(self._magic, 4)
