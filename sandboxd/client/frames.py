"""The frames of a command's stream, from bytes as they come. No input or output here.

One JSON object a line::

    started  exec_id           stdout, stderr  data, encoding
    heartbeat                  exit  exit_code, …   or   error  error

Each has a ``seq``; a stream that was cut is taken up again at ``next_seq``, and what comes twice is
passed over. ``exit`` or ``error`` is the last one: a stream that ends without is cut.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from sandboxd.client.failures import NotSandboxd, error_from_json
from sandboxd.client.results import Output, StreamExit, decoded
from sandboxd.errors import SandboxdError

_OUTPUT: dict[str, Literal["stdout", "stderr"]] = {"stdout": "stdout", "stderr": "stderr"}


class FrameReader:
    """Feed it what arrives; ``exit`` or ``error`` is set once the final frame was seen."""

    def __init__(self, exec_id: str, next_seq: int = 0) -> None:
        self.exec_id = exec_id
        """What to resume by."""
        self.next_seq = next_seq
        self.exit: StreamExit | None = None
        self.error: SandboxdError | None = None
        self._partial = b""

    @property
    def ended(self) -> bool:
        return self.exit is not None or self.error is not None

    def cut(self) -> None:
        """The connection broke: half a line will come again as a whole one."""
        self._partial = b""

    def feed(self, data: bytes) -> list[Output]:
        """The output in it. Raises NotSandboxd for what is no frame."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        output = []
        for line in lines:
            try:
                output += self._frame(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise NotSandboxd(f"a line that is no frame: {error}") from error
        return output

    def _frame(self, frame: dict[str, Any]) -> list[Output]:
        kind, seq = frame["type"], int(frame["seq"])
        if kind == "heartbeat" or seq < self.next_seq or self.ended:
            return []
        self.next_seq = seq + 1
        if kind in _OUTPUT:
            return [Output(_OUTPUT[kind], decoded(frame["data"], frame["encoding"]))]
        if kind == "started":
            self.exec_id = str(frame["exec_id"])
        elif kind == "exit":
            self.exit = StreamExit.from_json(frame)
        elif kind == "error":
            self.error = error_from_json(frame["error"])
        return []  # of a kind that a newer node may send
