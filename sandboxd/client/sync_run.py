"""A run of this controller's, blocking: kept alive by a thread for as long as its block lasts."""

from __future__ import annotations

import logging
import os
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from sandboxd.client import run_calls
from sandboxd.client.calls import CreateOptions
from sandboxd.client.run_calls import RunEnd, RunInfo, RunOptions
from sandboxd.errors import RunEnded, RunNotFound, SandboxdError

if TYPE_CHECKING:
    from sandboxd.client.sync import Client, Sandbox

log = logging.getLogger(__name__)


class Run:
    """Sandboxes that end together: with this block, or ``lease_s`` after this process has died.

    The thread that tells the node that this process lives ends with the block. A process forked
    from it neither renews the run nor ends it.
    """

    def __init__(
        self, client: Client, name: str | None, lease_s: float, options: RunOptions
    ) -> None:
        self._client = client
        self.name = name or run_calls.new_name()
        self._lease_s = lease_s
        self._options = options
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self.lost: SandboxdError | None = None
        """Why the node has ended the run, if it has; creates are refused then (``run-ended``)."""

    def __enter__(self) -> Self:
        self._client.do(run_calls.put(self.name, self._lease_s, self._options))
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._beat, name=f"{self.name} heartbeat")
        # Should somebody leave the block by ending the interpreter, the lease ends the run.
        self._thread.daemon = True
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return
        self._over.set()
        try:
            self.end()
        except SandboxdError:
            if error is None:  # the first error is the one to tell of; the lease ends the run
                raise
        finally:
            if self._thread is not None:
                self._thread.join()

    def create(self, image: str, **options: Unpack[CreateOptions]) -> Sandbox:
        """A sandbox of this run."""
        options["run"] = self.name
        return self._client.create(image, **options)

    def refresh(self) -> RunInfo:
        """Ask about it."""
        return self._client.do(run_calls.get(self.name))

    def end(self, within_s: float = 60.0) -> RunEnd:
        """End everything of it, now. Idempotent."""
        return self._client.do(run_calls.end(self.name, within_s))

    def _beat(self) -> None:
        heard = True
        while not self._over.wait(run_calls.next_beat_s(self._lease_s, heard=heard)):
            try:
                heard = self._beat_once()
            except RunEnded as error:
                self.lost = error
                return

    def _beat_once(self) -> bool:
        try:
            try:
                self._client.do(run_calls.heartbeat(self.name, self._lease_s))
            except RunNotFound:
                # The node has begun anew and knows nothing: neither of the run nor its sandboxes.
                if not self._over.is_set():
                    self._client.do(run_calls.put(self.name, self._lease_s, self._options))
        except RunEnded:
            raise
        except SandboxdError as error:
            log.warning("run %s: no heartbeat: %s", self.name, error.message)
            return False
        return True
