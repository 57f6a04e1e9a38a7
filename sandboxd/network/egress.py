"""The egress log of one sandbox: where it went, where it was stopped, what names it asked for.

What is the same (kind, verdict, destination) is one entry with a count, so that a program that
tries again for hours leaves one line. An entry that is seen again goes to the end under a new
``seq``: who asks for what is after the last ``seq`` it knows is told all that changed. The oldest
make room.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Final

ENTRIES_MAX: Final = 512
NAME_CHARS_MAX: Final = 255

Key = tuple[str, bool, str, str, int, str]


@dataclass(slots=True)
class EgressEntry:
    """``kind``: ``connection`` or ``dns``. A connection has ``protocol address port``; a query has
    ``name`` and, where it was answered with some, ``addresses``. Times are Unix time."""

    seq: int
    kind: str
    allowed: bool
    protocol: str
    address: str
    port: int
    name: str
    first_at: float
    last_at: float
    count: int = 1
    addresses: tuple[str, ...] = ()


class EgressLog:
    def __init__(self) -> None:
        self._entries: OrderedDict[Key, EgressEntry] = OrderedDict()
        self._seq = 0
        self.counts: Counter[str] = Counter()
        """By ``connections_allowed``, ``connections_denied``, ``dns_allowed``, ``dns_denied``: all
        that was logged, and ``entries_dropped``."""

    def connection(self, allowed: bool, protocol: str, address: str, port: int) -> None:
        self.counts["connections_allowed" if allowed else "connections_denied"] += 1
        self._add(("connection", allowed, protocol, address, port, ""), ())

    def query(self, allowed: bool, kind: str, name: str, addresses: tuple[str, ...]) -> None:
        """``kind`` is the type that was asked for, such as ``A``."""
        self.counts["dns_allowed" if allowed else "dns_denied"] += 1
        self._add(("dns", allowed, kind, "", 0, name[:NAME_CHARS_MAX]), addresses)

    def _add(self, key: Key, addresses: tuple[str, ...]) -> None:
        now = time.time()
        self._seq += 1
        entry = self._entries.pop(key, None)
        if entry is None:
            kind, allowed, protocol, address, port, name = key
            entry = EgressEntry(
                self._seq, kind, allowed, protocol, address, port, name, now, now, 0
            )
        entry.seq, entry.last_at = self._seq, now
        entry.count += 1
        entry.addresses = addresses or entry.addresses
        self._entries[key] = entry
        while len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)
            self.counts["entries_dropped"] += 1

    def page(self, after: int, limit: int) -> dict[str, Any]:
        """``entries`` after a ``seq``, oldest first, ``counts``, and whether there is ``more``."""
        found = [entry for entry in self._entries.values() if entry.seq > after]
        return {
            "entries": [asdict(entry) for entry in found[:limit]],
            "counts": dict(self.counts),
            "more": len(found) > limit,
        }
