"""When a request is sent again: only where that cannot do anything twice. No clock, no input.

================================== ============================ ================
what happened                      ``repeatable`` call          any other (exec)
================================== ============================ ================
no connection could be made        again                        again
429: refused before it was begun   again, after Retry-After     the same
503 with a retryable error         again, after Retry-After     the error
the connection broke, no answer    again                        the error
================================== ============================ ================

Repeatable are reads, deletions, whole-file writes, and a create, which has an Idempotency-Key. All
tries together are bounded in time; the last error is the one that is raised.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import httpx

from sandboxd.client.failures import (
    AnswerTimeout,
    ConnectionFailed,
    ConnectionLost,
    error_from_body,
)
from sandboxd.errors import SandboxdError

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, as far as it is looked at."""

    status: int
    body: bytes
    retry_after: str | None = None


class Tries:
    """The tries of one call. ``within_s`` is how long after the first one may still begin."""

    __slots__ = ("_count", "_repeatable", "_until", "_url")

    def __init__(self, url: str, *, repeatable: bool, now: float, within_s: float) -> None:
        self._url = url
        self._repeatable = repeatable
        self._until = now + within_s
        self._count = 0

    def after_failure(self, failure: httpx.TransportError, now: float) -> float:
        """Seconds to wait before the next try. Raises the error where there is none."""
        error, again = transport_error(failure, self._url)
        if not again and not self._repeatable:
            raise error from failure
        return self._pause(error, 0.0, now)

    def after_answer(self, answer: Answer, now: float) -> float:
        """The same, for an answer of 400 or more."""
        error = error_from_body(answer.body, answer.status)
        refused = answer.status == httpx.codes.TOO_MANY_REQUESTS
        unavailable = answer.status == httpx.codes.SERVICE_UNAVAILABLE and error.retryable
        if not refused and not (unavailable and self._repeatable):
            raise error
        return self._pause(error, _seconds(answer.retry_after), now)

    def _pause(self, error: SandboxdError, at_least_s: float, now: float) -> float:
        ceiling_s = min(FIRST_PAUSE_S * 2**self._count, LONGEST_PAUSE_S)
        self._count += 1
        # Spread out: thousands of workers were refused at the same moment.
        pause_s = at_least_s * random.uniform(1.0, 1.25) + random.uniform(0.0, ceiling_s)
        if now + pause_s > self._until:
            raise error
        return pause_s


def transport_error(failure: httpx.TransportError, url: str) -> tuple[SandboxdError, bool]:
    """What it means, and whether it is certain that nothing was asked."""
    words = str(failure) or type(failure).__name__
    if isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        hint = "is the daemon running there? (sandboxd serve; SANDBOXD_URL)"
        return ConnectionFailed(f"{url}: {words}", hint=hint), True
    if isinstance(failure, httpx.TimeoutException):
        return AnswerTimeout(f"{url} did not answer in time"), False
    if isinstance(failure, httpx.UnsupportedProtocol):
        return ConnectionFailed(f"{url}: {words}", hint="an address begins with http://"), True
    return ConnectionLost(f"{url}: {words}"), False


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:  # a date: no node of ours sends one
        return 0.0


class Resumes:
    """How often a stream that was cut is taken up again: as long as that brings something."""

    __slots__ = ("_barren", "_seq")

    BARREN_MAX: Final = 5
    """Cuts in a row without a frame in between."""

    def __init__(self) -> None:
        self._barren = 0
        self._seq = 0

    def progress(self, next_seq: int) -> None:
        if next_seq != self._seq:
            self._seq, self._barren = next_seq, 0

    def after_cut(self, cut: ConnectionLost | None) -> float:
        """Seconds to wait before it is taken up. Raises the error where it is given up."""
        self._barren += 1
        if self._barren > self.BARREN_MAX:
            raise cut or ConnectionLost("the stream of the command was cut")
        return random.uniform(0.0, FIRST_PAUSE_S * 2**self._barren)
