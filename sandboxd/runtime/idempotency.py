"""What was answered under an Idempotency-Key, so that the same request gets the same answer again.

Only successes are kept: a create that failed may be tried again with the same key. Bounded in
number and in time. A daemon that restarts reads the keys of living sandboxes from their ``meta``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sandboxd.errors import IdempotencyConflict
from sandboxd.model import InlineFile, SandboxSpec
from sandboxd.runtime.sandbox import IdempotencyMark, SandboxView

KEYS_MAX: Final = 20_000
KEEP_S: Final = 3600.0


def fingerprint(spec: SandboxSpec, files: Sequence[InlineFile] = ()) -> str:
    """Equal for equal requests."""
    text = json.dumps(spec.to_json(), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for file in files:
        head = json.dumps([file.path, file.mode, file.user, len(file.content)])
        digest.update(head.encode("utf-8", "surrogatepass") + file.content)
    return digest.hexdigest()[:32]


@dataclass(slots=True)
class _Kept:
    fingerprint: str
    answer: asyncio.Future[SandboxView]
    until: float


class IdempotencyKeys:
    """One table for the daemon. Needs a running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def find(self, mark: IdempotencyMark) -> asyncio.Future[SandboxView] | None:
        """The answer given, or being made, under this key; None when there is none.

        Raises IdempotencyConflict when another request used the key.
        """
        self._forget_old()
        kept = self._kept.get(mark.key)
        if kept is None:
            return None
        if kept.fingerprint != mark.fingerprint:
            raise IdempotencyConflict("this Idempotency-Key was used for another request")
        return kept.answer

    def begin(self, mark: IdempotencyMark) -> asyncio.Future[SandboxView]:
        """Claim the key. The future is the claimer's: a result is kept, anything else frees it."""
        answer: asyncio.Future[SandboxView] = self._loop.create_future()
        self._kept[mark.key] = _Kept(mark.fingerprint, answer, self._loop.time() + KEEP_S)
        answer.add_done_callback(lambda _: self._ended(mark.key, answer))
        while len(self._kept) > KEYS_MAX:
            self._kept.popitem(last=False)
        return answer

    def remember(self, mark: IdempotencyMark, view: SandboxView) -> None:
        """An answer that an earlier daemon gave."""
        self.begin(mark).set_result(view)

    def _ended(self, key: str, answer: asyncio.Future[SandboxView]) -> None:
        kept = self._kept.get(key)
        failed = answer.cancelled() or answer.exception() is not None
        if failed and kept is not None and kept.answer is answer:
            del self._kept[key]

    def _forget_old(self) -> None:
        now = self._loop.time()
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.until > now or not kept.answer.done():
                return
            del self._kept[key]
