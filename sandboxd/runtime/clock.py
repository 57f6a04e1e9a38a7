"""Durations as the API tells them."""

from __future__ import annotations

import time


def ms_since(at: float) -> float:
    """Milliseconds. By the system's clock: uvloop's has a grain of a millisecond."""
    return round((time.monotonic() - at) * 1000, 3)
