"""What became of a node and its sandboxes: one bounded ring, and followers.

Each event has a ``seq`` that only grows, also from one daemon to the next: it begins at the
daemon's start in microseconds since the epoch. So whoever was cut off comes back with the last one
it saw, and is told of a gap, whether the ring has forgotten meanwhile or the daemon is another one.
A follower reads from the ring at its own pace; one that is too slow has a gap, and costs nobody
memory.

Beside the kinds of ``events``: ``create-failed``, ``deleted`` (no process of it lives), ``gap``
(what came between is lost), and of the node, without a sandbox: ``node-connected``, ``node-lost``,
``image-died``, ``drain``, ``undrain``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from pydantic_core import to_json

from sandboxd.errors import NodeOverloaded, StreamPositionLost
from sandboxd.model import Event

RING: Final = 8192
"""Some 4 MiB; half an hour of a node that makes a sandbox a second."""
FOLLOWERS_MAX: Final = 64
BATCH: Final = 512


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """``sandbox`` and ``run`` are empty where it is the node's own."""

    seq: int
    sandbox: str
    run: str
    event: Event

    def line(self) -> bytes:
        event = self.event
        at = datetime.fromtimestamp(event.at, UTC).isoformat(timespec="milliseconds")
        row = {
            "type": "event",
            "seq": self.seq,
            "at": at.replace("+00:00", "Z"),
            "kind": event.kind,
            "sandbox": self.sandbox or None,
            "run": self.run or None,
            "message": event.message,
            "detail": event.detail,
        }
        return to_json(row, inf_nan_mode="null", fallback=str) + b"\n"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events: all that is given must fit; empty is any."""

    sandbox: str = ""
    run: str = ""
    kinds: frozenset[str] = field(default_factory=frozenset)

    def fits(self, one: NodeEvent) -> bool:
        return (
            (not self.sandbox or one.sandbox == self.sandbox)
            and (not self.run or one.run == self.run)
            and (not self.kinds or one.event.kind in self.kinds)
        )


class NodeEvents:
    """``on_event`` hears of each; ``first`` is the seq before the first event."""

    def __init__(self, on_event: Callable[[Event], None], first: int | None = None) -> None:
        self._on_event = on_event
        self._ring: deque[NodeEvent] = deque(maxlen=RING)
        self.last_seq = int(time.time() * 1e6) if first is None else first
        self._followers: set[Follower] = set()
        self._closed = False

    def add(self, sandbox: str, run: str, event: Event) -> None:
        self.last_seq += 1
        self._ring.append(NodeEvent(self.last_seq, sandbox, run, event))
        self._on_event(event)
        for follower in self._followers:
            follower.wake()

    def tell(
        self, kind: str, message: str, sandbox: str = "", run: str = "", **detail: Any
    ) -> None:
        """One that is in no sandbox's own log."""
        self.add(sandbox, run, Event(0, time.time(), kind, message, detail))

    def follow(self, after: int, wanted: Wanted, *, stay: bool) -> Follower:
        """A reader of what followed ``after`` (0: of all there is), which ends there unless it is
        to ``stay``. Raises StreamPositionLost for what has not been yet, NodeOverloaded."""
        if after > self.last_seq:
            raise StreamPositionLost(
                f"there is no event {after} yet", last_seq=self.last_seq, reason="future"
            )
        if len(self._followers) >= FOLLOWERS_MAX:
            raise NodeOverloaded(
                f"{FOLLOWERS_MAX} follow the node's events already", reason="followers"
            )
        follower = Follower(self, after, wanted, stay=stay)
        self._followers.add(follower)
        return follower

    def forget(self, follower: Follower) -> None:
        self._followers.discard(follower)

    def after(self, seq: int) -> tuple[list[NodeEvent], int | None]:
        """At most ``BATCH`` that followed, and the seq before the first of them if some between are
        lost."""
        # Every seq after this one is there, one after the other.
        lost_before = self.last_seq - len(self._ring)
        gap = lost_before if 0 < seq < lost_before else None
        start = max(seq, lost_before) - lost_before
        return list(islice(self._ring, start, start + BATCH)), gap

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End every follower."""
        self._closed = True
        for follower in self._followers:
            follower.wake()


class Follower:
    """A ``FrameReader``: lines of events, heartbeats that tell how far it has read, and an ``end``
    where it was not cut."""

    def __init__(self, events: NodeEvents, after: int, wanted: Wanted, *, stay: bool) -> None:
        self._events = events
        self._at = after
        self._wanted = wanted
        self._stay = stay
        self._ended = False
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def next(self, timeout_s: float) -> bytes | None:
        if self._ended:
            return None
        until = time.monotonic() + timeout_s
        while True:
            self._woken.clear()
            lines = self._read()
            if lines:
                return b"".join(lines)
            if not self._caught_up():
                await asyncio.sleep(0)  # nothing of a whole batch fitted: others have their turn
                continue
            if not self._stay or self._events.closed:
                self._ended = True
                return self._mark("end")
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self._woken.wait()
            except TimeoutError:
                return self._mark("heartbeat")

    def _caught_up(self) -> bool:
        return self._at >= self._events.last_seq

    def _read(self) -> list[bytes]:
        found, gap = self._events.after(self._at)
        lines = []
        if gap is not None:
            lost = Event(0, time.time(), "gap", "what came between is lost", {"after": self._at})
            lines.append(NodeEvent(gap, "", "", lost).line())
        if found:
            self._at = found[-1].seq
        elif gap is not None:
            self._at = gap
        elif self._at < self._events.last_seq:
            self._at = self._events.last_seq
        lines += [one.line() for one in found if self._wanted.fits(one)]
        return lines

    def _mark(self, kind: str) -> bytes:
        return to_json({"type": kind, "seq": self._at}) + b"\n"

    def close(self) -> None:
        self._events.forget(self)
