"""How much an image may ask of us before it is refused.

The figures are far beyond real images and far below what harms: a few kilobytes of compressed
zeros, or one header of a sparse file, can claim more than any disk holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sif_tools.errors import TooLarge

# The ratio counts only beyond this: small layers of one sparse file compress at will.
RATIO_FREE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """`layer_bytes` and `ratio` are about a layer's inflated stream, the rest about its entries.

    `content_bytes` is what the files of one layer hold, holes included.
    """

    layer_bytes: int = 128 << 30
    ratio: int = 200
    entries: int = 20_000_000
    content_bytes: int = 256 << 30
    download_bytes: int = 128 << 30

    def __post_init__(self) -> None:
        if not 0 < self.entries < 1 << 32:
            raise ValueError("entries are counted in 32 bits")

    def check_inflated(self, inflated_bytes: int, stored_bytes: int) -> None:
        """TooLarge for a stream that has grown out of proportion; call it as it grows."""
        if inflated_bytes > self.layer_bytes:
            raise TooLarge(f"the layer inflates to more than {self.layer_bytes} bytes", hint=_HINT)
        if inflated_bytes > RATIO_FREE_BYTES and inflated_bytes > self.ratio * stored_bytes:
            raise TooLarge(
                f"the layer inflates to more than {self.ratio} times its size", hint=_HINT
            )

    def check_content(self, entries: int, content_bytes: int) -> None:
        """TooLarge for a layer with too many entries, or files that claim too much."""
        if entries > self.entries:
            raise TooLarge(f"more than {self.entries} entries in the layer", hint=_HINT)
        if content_bytes > self.content_bytes:
            raise TooLarge(
                f"the files up to this one hold more than {self.content_bytes} bytes", hint=_HINT
            )


_HINT: Final = "an image made to exhaust whoever opens it; if it is real, raise the limit"

DEFAULT_LIMITS: Final = Limits()
