"""What became of one sandbox: a bounded ring, for whoever asks later why something happened.

For: people and trainers who look at one sandbox. Not for: metrics (counters over all sandboxes).
Not kept over a restart of the daemon; what lives on is told anew as ``adopted``. ``told`` hears of
each, for the events of the whole node (``node_events``).

Kinds: ``created``, ``adopted``, ``exec-failed`` (a command that gave no result, with our error's
code), ``oom`` (the kernel killed for memory under a command), ``paused``, ``resumed``, ``renewed``,
``failed`` (nothing can run in it any more, and why), ``deleting``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from sandboxd.model import Event

EVENTS_MAX: Final = 256
MESSAGE_MAX: Final = 500
"""Characters: an error quotes what it was asked for, and that may be a path of 4 KiB."""


class EventLog:
    """The last ``EVENTS_MAX`` events; older ones are gone, and their number is known."""

    __slots__ = ("_events", "_last_seq", "told")

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._last_seq = 0
        self.told: Callable[[Event], None] = _nobody

    def add(self, kind: str, message: str, **detail: Any) -> None:
        self._last_seq += 1
        event = Event(self._last_seq, time.time(), kind, message[:MESSAGE_MAX], detail)
        self._events.append(event)
        self.told(event)

    def after(self, seq: int, limit: int) -> list[Event]:
        """Those that followed ``seq``, the oldest first. A gap in ``seq`` is what the ring lost."""
        return [event for event in self._events if event.seq > seq][:limit]


def _nobody(event: Event) -> None:
    del event
