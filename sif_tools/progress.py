"""How a conversion tells how far it is. What shows it is the caller's matter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

# A screen cannot show more, and a call per chunk would cost as much as the chunk.
_INTERVAL_S: Final = 0.05


class Stage(StrEnum):
    """In the order in which they come."""

    RESOLVE = "resolve"
    INDEX = "index"
    PACK = "pack"
    PUBLISH = "publish"


# stage, bytes done, bytes in all (None where that is not known before)
ProgressCallback = Callable[[Stage, int, int | None], None]


class StageClock:
    """Times the stages and passes progress on, not more often than a person can see."""

    def __init__(self, callback: ProgressCallback | None = None) -> None:
        self.seconds: dict[Stage, float] = {}
        self._callback = callback
        self._told_at = 0.0

    @contextmanager
    def stage(self, stage: Stage, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
        """One stage; gives the function to tell bytes done to."""
        start = time.monotonic()

        def tell(done_bytes: int) -> None:
            now = time.monotonic()
            if self._callback is not None and now - self._told_at >= _INTERVAL_S:
                self._told_at = now
                self._callback(stage, done_bytes, total_bytes)

        if self._callback is not None:
            self._callback(stage, 0, total_bytes)
        yield tell
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start
        if self._callback is not None and total_bytes is not None:
            self._callback(stage, total_bytes, total_bytes)
