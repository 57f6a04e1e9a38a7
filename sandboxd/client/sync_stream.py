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
from sandboxd.client.results import ExecExit, Output
from sandboxd.client.retries import Resumes
from sandboxd.client.sync_driver import Driver


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
        # At once: a command that cannot be started is refused here, not at the first iteration.
        self._pieces = self._connection.enter_context(driver.stream(call))

    @property
    def exec_id(self) -> str | None:
        """To come back to it with ``Sandbox.resume_stream``; None until its first frame."""
        return self._frames.exec_id

    @property
    def exit(self) -> ExecExit:
        """How it ended. Reads what is left of the output, and throws that away."""
        for _ in self:
            pass
        assert self._frames.exit is not None
        return self._frames.exit

    def __iter__(self) -> Iterator[Output]:
        """Raises the command's SandboxdError where there is no result."""
        resumes = Resumes()
        while not self._frames.ended:
            try:
                for piece in self._pieces:
                    resumes.progress(self._frames.next_seq)
                    yield from self._frames.feed(piece)
            except ConnectionLost as error:
                cut: ConnectionLost | None = error
            else:
                cut = None
            if not self._frames.ended:
                self._take_up(resumes.after_cut(self.exec_id, cut))
        self.close()
        if self._frames.error is not None:
            raise self._frames.error

    def _take_up(self, pause_s: float) -> None:
        self.close()
        self._frames.cut()
        time.sleep(pause_s)
        assert self.exec_id is not None
        call = calls.resume_stream(self._sandbox_id, self.exec_id, self._frames.next_seq)
        self._pieces = self._connection.enter_context(self._driver.stream(call))

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
