"""Run an iterator of chunks in a thread, a few chunks ahead of whoever consumes it.

Decompression and hashing release the interpreter lock, so this lets the next chunk be inflated
while the last one is parsed and written. Bounded, and the thread ends with the consumer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Final

_DEPTH: Final = 8


class Prefetch:
    """An iterator over `source`, filled by a thread. Close it; a `with` statement does."""

    def __init__(self, source: Iterator[bytes], depth: int = _DEPTH) -> None:
        self._source = source
        self._depth = depth
        self._ready: deque[bytes] = deque()
        self._error: BaseException | None = None
        self._done = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fill, name="sif-prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._changed:
            while not self._ready and not self._done:
                self._changed.wait()
            if self._ready:
                chunk = self._ready.popleft()
                self._changed.notify_all()
                return chunk
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; the source is not used after this returns."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _fill(self) -> None:
        try:
            for chunk in self._source:
                with self._changed:
                    while len(self._ready) >= self._depth and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    self._ready.append(chunk)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  handed to the consumer, whatever it is
            self._error = error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()
