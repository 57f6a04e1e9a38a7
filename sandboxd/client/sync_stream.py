"""A command's output while it runs, blocking; taken up again where its connection is cut."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from sandboxd.client import calls
from sandboxd.client.calls import Call
from sandboxd.client.failures import ConnectionLost
from sandboxd.client.frames import FrameReader
from sandboxd.client.results import Output, StreamExit
from sandboxd.client.retries import Resumes
from sandboxd.client.sync_driver import Driver
from sandboxd.errors import ExecNotFound


class ExecStream:
    """Iterate over the output; ``exit`` says how the command ended once that is over.

    A context manager: leaving it early closes the connection, and the node kills the command soon
    after unless it was detached.
    """

    def __init__(
        self, driver: Driver, sandbox_id: str, call: Call[None], frames: FrameReader
    ) -> None:
        self._driver = driver
        self._sandbox_id = sandbox_id
        self._frames = frames
        self._connection = contextlib.ExitStack()
        self._cut: ConnectionLost | None = None
        self._pieces: Iterator[bytes] = iter(())
        # At once: a command that cannot be started is refused here, not at the first iteration.
        try:
            self._pieces = self._connection.enter_context(driver.stream(call))
        except ConnectionLost as error:
            self._cut = error

    @property
    def exec_id(self) -> str:
        """To come back to it with ``Sandbox.resume_stream``, or to kill it by."""
        return self._frames.exec_id

    @property
    def exit(self) -> StreamExit:
        """How it ended. Reads what is left of the output, and throws that away."""
        for _ in self:
            pass
        assert self._frames.exit is not None
        return self._frames.exit

    def __iter__(self) -> Iterator[Output]:
        """Raises the command's SandboxdError where there is no result."""
        resumes = Resumes()
        while not self._frames.ended:
            cut, self._cut = self._cut, None
            try:
                for piece in self._pieces:
                    resumes.progress(self._frames.next_seq)
                    yield from self._frames.feed(piece)
            except ConnectionLost as error:
                cut = error
            if not self._frames.ended:
                self._take_up(resumes.after_cut(cut), cut)
        self.close()
        if self._frames.error is not None:
            raise self._frames.error

    def _take_up(self, pause_s: float, cut: ConnectionLost | None) -> None:
        self.close()
        self._frames.cut()
        time.sleep(pause_s)
        call = calls.resume_stream(self._sandbox_id, self.exec_id, self._frames.next_seq)
        try:
            self._pieces = self._connection.enter_context(self._driver.stream(call))
        except ExecNotFound:
            if self._frames.next_seq > 0:
                raise
            # Nobody knows whether it was begun.
            raise cut or ConnectionLost("the stream of the command was cut") from cut

    def kill(self) -> None:
        """Kill the command with its whole tree, detached or not; a session's is interrupted. What
        is left of the output, and how it ended, can still be read. Idempotent."""
        self._driver.do(calls.kill_exec(self._sandbox_id, self.exec_id))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
