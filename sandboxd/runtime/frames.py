"""The frames of a command's stream: JSON objects, one a line (NDJSON), each with its ``seq``.

::

    {"seq": 0, "type": "started", "exec_id": "ex-…", "pid": 7}
    {"seq": 1, "type": "stdout", "data": "…", "encoding": "utf-8"}
    {"seq": 2, "type": "stderr", "data": "…", "encoding": "utf-8"}
    {"seq": 2, "type": "heartbeat"}            (repeats the seq before it; is not kept)
    {"seq": 3, "type": "exit", "exit_code": 0, …}      or
    {"seq": 3, "type": "error", "error": {"code": …, …}}

The last frame is ``exit`` or ``error``: a stream that ends without one was cut off. Whoever was cut
off comes back with the seq after the last one it saw. Frames are kept as the lines that are sent:
what is counted is what memory they take, and sending one again costs nothing.
"""

from __future__ import annotations

import binascii
import codecs
from typing import Any, Final

from pydantic_core import to_json

from sandboxd.errors import SandboxdError
from sandboxd.model import ExecResult

ENCODINGS: Final = ("utf-8", "base64")


class Text:
    """One output stream's bytes as the text of frames.

    ``utf-8`` is decoded incrementally: a character that two reads share is in the second frame, and
    what is no UTF-8 becomes U+FFFD. ``base64``: each frame's data is padded and whole by itself.
    """

    __slots__ = ("_decoder", "encoding")

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """May be empty, while a character is incomplete."""
        if self.encoding == "base64":
            return binascii.b2a_base64(data, newline=False).decode()
        return self._decoder.decode(data, final)


def line(seq: int, kind: str, fields: dict[str, Any]) -> bytes:
    return to_json({"seq": seq, "type": kind, **fields}, inf_nan_mode="null", fallback=str) + b"\n"


def heartbeat(seq: int) -> bytes:
    return b'{"seq":%d,"type":"heartbeat"}\n' % seq


def exit_fields(result: ExecResult) -> dict[str, Any]:
    """An ``exit`` frame: what an exec answers, less the data."""
    return {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "timeout_reason": result.timeout_reason,
        "oom_killed": result.oom_killed,
        "stdout_total_bytes": result.stdout.total_bytes,
        "stderr_total_bytes": result.stderr.total_bytes,
        "wall_s": result.wall_s,
        "cpu_user_s": result.cpu_user_s,
        "cpu_system_s": result.cpu_system_s,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def error_fields(error: SandboxdError) -> dict[str, Any]:
    """The public body of an error, also that of an HTTP answer."""
    return {
        "code": error.code,
        "message": error.message,
        "cause": error.cause,
        "retryable": error.retryable,
        "hint": error.hint,
        "detail": error.detail,
    }
