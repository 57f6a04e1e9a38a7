"""A background process of a sandbox, blocking. It outlives this client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from sandboxd.client import process_calls
from sandboxd.client.process_calls import PIECE_BYTES, WAIT_S, Follow, ProcessInfo, ProcessNews
from sandboxd.client.results import Output
from sandboxd.client.sync_driver import Driver


class Process:
    """Made by ``Sandbox.start_process`` or ``process``. Its id is valid until it is removed, also
    after a restart of the daemon."""

    def __init__(self, driver: Driver, sandbox_id: str, info: ProcessInfo) -> None:
        self._driver = driver
        self._sandbox_id = sandbox_id
        self.info = info
        """What was last known of it; ``refresh`` asks again."""

    @property
    def id(self) -> str:
        return self.info.id

    def refresh(self) -> ProcessInfo:
        """Ask about it."""
        return self.read({}).info

    def wait(self, timeout_s: float | None = None) -> ProcessInfo:
        """Wait for its end. Raises TimeoutError, and leaves it running."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.info.running:
            left_s = WAIT_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"process {self.id} runs on after {timeout_s} s")
            self.read({}, wait_s=min(left_s, WAIT_S))
        return self.info

    def read(
        self,
        offsets: Mapping[str, int],
        *,
        wait_s: float = 0.0,
        max_bytes: int = PIECE_BYTES,
    ) -> ProcessNews:
        """Its state, and its output from these offsets (``stdout``, ``stderr``); with ``wait_s``
        once there is some, or it has ended, or the time is up."""
        call = process_calls.news(
            self._sandbox_id, self.id, wait_s=wait_s, offsets=offsets, max_bytes=max_bytes
        )
        told = self._driver.do(call)
        self.info = told.info
        return told

    def output(self, offsets: Mapping[str, int] | None = None) -> Iterator[Output]:
        """Its output as it comes, from its beginning or these offsets, until it has ended."""
        follow = Follow(self._sandbox_id, self.id, offsets)
        while not follow.ended:
            told = self._driver.do(follow.call())
            self.info = told.info
            yield from follow.take(told)

    def write(self, data: str | bytes, *, eof: bool = False, timeout_s: float = 30.0) -> int:
        """Write to its stdin; returns once its pipe has taken all. ``eof`` closes it then."""
        raw = data.encode() if isinstance(data, str) else data
        return self._driver.do(process_calls.write(self._sandbox_id, self.id, raw, eof, timeout_s))

    def close_stdin(self) -> None:
        self._driver.do(process_calls.close_stdin(self._sandbox_id, self.id))

    def signal(self, number: int | str = "TERM", *, tree: bool = False) -> None:
        """A number, or a name such as ``INT``; to it alone or to all that it has started."""
        self._driver.do(process_calls.send_signal(self._sandbox_id, self.id, number, tree))

    def resize(self, cols: int, rows: int) -> None:
        """Of its terminal. Raises NotATerminal."""
        self._driver.do(process_calls.resize(self._sandbox_id, self.id, cols, rows))

    def remove(self) -> None:
        """Kill its whole tree and forget it with its output. When it returns, none of it lives."""
        self._driver.do(process_calls.remove(self._sandbox_id, self.id))
