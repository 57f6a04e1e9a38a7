"""A command whose output is told while it runs, and kept for a client that was cut off.

Memory is bounded at both ends. Frames that no client took yet stop the reading of the command's
pipes at ``unsent_bytes``: a slow client slows the command down, as a pipe would. Frames that were
sent are kept up to ``replay_bytes`` for one that comes back, and less once all streams together
keep more than the node's budget; a position that is no longer kept is an error by name.

One client at a time: one that comes back takes over from the one that is still there. A command
that nobody listens to is killed after ``resume_s``, unless it was detached: then its oldest frames
are thrown away to let it go on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sandboxd.errors import ExecIdTaken, ExecNotFound, SandboxdError, StreamPositionLost
from sandboxd.model import ExecResult, StreamResult
from sandboxd.runtime import frames

BATCH_BYTES: Final = 256 * 1024
"""Sent in one go at most, so that the HTTP server's own buffer stays small."""

MINIMUM_REPLAY_BYTES: Final = 64 * 1024
ENDED_MAX: Final = 4096
"""Streams that have ended and are kept for a client that may come back."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    unsent_bytes: int
    replay_bytes: int
    total_bytes: int
    """Of all streams; above it each keeps only MINIMUM_REPLAY_BYTES for replay."""
    resume_s: float
    detached_s: float
    """How long the end of a detached command is kept."""


class Source(Protocol):
    """What makes a stream's bytes; an ``Exec`` is one, and so is a session's command."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def cancel(self) -> None: ...


class _Sink:
    """One of a command's streams, as frames."""

    __slots__ = ("_kind", "_stream", "_text", "total_bytes")

    def __init__(self, stream: ExecStream, kind: str, encoding: str) -> None:
        self._stream = stream
        self._kind = kind
        self._text = frames.Text(encoding)
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        self.total_bytes += len(data)
        self._tell(self._text.feed(data))

    def finish(self) -> None:
        self._tell(self._text.feed(b"", final=True))

    def _tell(self, text: str) -> None:
        if text:
            fields = {"data": text, "encoding": self._text.encoding}
            self._stream.append(self._kind, fields)

    def result(self) -> StreamResult:
        return StreamResult(b"", self.total_bytes, False)


class Reader:
    """One client's place in a stream."""

    def __init__(self, stream: ExecStream, position: int) -> None:
        self._stream = stream
        self.position = position
        """Seq of the next frame to send."""
        self.wakeup: asyncio.Future[None] | None = None

    async def next(self, timeout_s: float) -> bytes | None:
        """Frames that are there, as lines; a heartbeat if none came in time; None after the final
        frame or once another client has taken over."""
        while True:
            lines = self._stream.take(self)
            if lines or self._stream.is_at_end(self):
                return lines or None
            self.wakeup = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.wakeup
            except TimeoutError:
                return frames.heartbeat(self.position - 1)
            finally:
                self.wakeup = None

    def wake(self) -> None:
        if self.wakeup is not None and not self.wakeup.done():
            self.wakeup.set_result(None)

    def close(self) -> None:
        """The client has gone."""
        self._stream.left(self)


class ExecStream:
    """The frames of one command. Made and fed in the event loop's thread."""

    def __init__(
        self,
        streams: Streams,
        key: tuple[str, str],
        *,
        encoding: str,
        detach: bool,
    ) -> None:
        self._streams = streams
        self.key = key
        self._detach = detach
        self._loop = asyncio.get_running_loop()
        self._lines: deque[bytes] = deque()
        self._first = 0
        self._kept_bytes = 0
        self._unsent_bytes = 0
        self._reader: Reader | None = None
        self._position = 0
        self._source: Source | None = None
        self._finish: asyncio.Future[ExecResult] | None = None
        self._exit_fields: Callable[[ExecResult], dict[str, Any]] = frames.exit_fields
        self._paused = False
        self._deaf = False
        self._timer: asyncio.TimerHandle | None = None
        self.ended = False
        self.sinks = (_Sink(self, "stdout", encoding), _Sink(self, "stderr", encoding))

    @property
    def exec_id(self) -> str:
        return self.key[1]

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    # --- the command's side ------------------------------------------------------------------

    def begin(
        self,
        source: Source,
        done: asyncio.Future[ExecResult],
        exit_fields: Callable[[ExecResult], dict[str, Any]] = frames.exit_fields,
    ) -> None:
        """Follow a command that was sent off with this stream's sinks."""
        self._source = source
        self._finish = done
        self._exit_fields = exit_fields
        done.add_done_callback(self._done)
        self._wait_for_reader()

    def started(self, pid: int) -> None:
        self.append("started", {"exec_id": self.exec_id, "pid": pid})

    def append(self, kind: str, fields: dict[str, Any]) -> None:
        line = frames.line(self._first + len(self._lines), kind, fields)
        self._lines.append(line)
        self._kept_bytes += len(line)
        self._unsent_bytes += len(line)
        self._streams.kept_bytes += len(line)
        self._trim()
        if self._unsent_bytes >= self._streams.limits.unsent_bytes and not self._paused:
            self._paused = True
            if self._source is not None:
                self._source.pause()
        if self._reader is not None:
            self._reader.wake()

    def _trim(self) -> None:
        limits = self._streams.limits
        over_budget = self._streams.kept_bytes > limits.total_bytes
        keep = MINIMUM_REPLAY_BYTES if over_budget else limits.replay_bytes
        while self._lines and self._kept_bytes - self._unsent_bytes > keep:
            self._drop_first()
        if self._deaf:
            while len(self._lines) > 1 and self._kept_bytes > limits.unsent_bytes // 2:
                self._drop_first()

    def _drop_first(self) -> None:
        dropped = len(self._lines.popleft())
        if self._first >= self._position:
            self._unsent_bytes -= dropped
            self._position = self._first + 1
        self._first += 1
        self._kept_bytes -= dropped
        self._streams.kept_bytes -= dropped

    def _done(self, done: asyncio.Future[ExecResult]) -> None:
        for sink in self.sinks:
            sink.finish()
        error = None if done.cancelled() else done.exception()
        if done.cancelled():
            error = SandboxdError("the command was given up")
        if error is None:
            self.append("exit", self._exit_fields(done.result()))
        else:
            if not isinstance(error, SandboxdError):
                error = SandboxdError("the daemon failed; its log says why")
            self.append("error", {"error": frames.error_fields(error)})
        self.ended = True
        self._source = None
        self._streams.has_ended(self.key)
        if self._reader is None:
            self._wait_for_reader()

    # --- the client's side -------------------------------------------------------------------

    def attach(self, position: int) -> Reader:
        """A client that reads from seq ``position`` on; the one before it, if any, is let go.

        Raises StreamPositionLost.
        """
        end = self._first + len(self._lines)
        if not self._first <= position <= end:
            raise StreamPositionLost(
                f"frame {position} is not kept: {self._first} to {end - 1} are",
                first_seq=self._first,
                last_seq=end - 1,
            )
        previous, self._reader = self._reader, Reader(self, position)
        if previous is not None:
            previous.wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._deaf = False
        self._position = position
        self._unsent_bytes = sum(
            len(line) for seq, line in enumerate(self._lines, self._first) if seq >= position
        )
        return self._reader

    def take(self, reader: Reader) -> bytes:
        """The next frames for ``reader``, BATCH_BYTES or one frame at most."""
        if reader is not self._reader:
            return b""
        batch: list[bytes] = []
        size = 0
        at = reader.position - self._first
        while at < len(self._lines) and (not batch or size + len(self._lines[at]) <= BATCH_BYTES):
            batch.append(self._lines[at])
            size += len(self._lines[at])
            at += 1
        reader.position = self._position = self._first + at
        self._unsent_bytes -= size
        self._trim()
        if self._paused and self._unsent_bytes < self._streams.limits.unsent_bytes // 2:
            self._go_on()
        return b"".join(batch)

    def is_at_end(self, reader: Reader) -> bool:
        end = self._first + len(self._lines)
        return reader is not self._reader or (self.ended and reader.position == end)

    def left(self, reader: Reader) -> None:
        if reader is self._reader:
            self._reader = None
            self._wait_for_reader()

    def _go_on(self) -> None:
        self._paused = False
        if self._source is not None:
            self._source.resume()

    def _wait_for_reader(self) -> None:
        limits = self._streams.limits
        delay_s = limits.detached_s if self.ended and self._detach else limits.resume_s
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._nobody_came)

    def _nobody_came(self) -> None:
        self._timer = None
        if self.ended:
            self._streams.forget(self.key)
        elif self._detach:
            self._deaf = True
            self._trim()
            self._go_on()
        elif self._source is not None:
            self._source.cancel()

    async def kill(self) -> None:
        """End the command, detached or not; its last frame says how. Idempotent."""
        if self._source is not None and self._finish is not None:
            self._source.cancel()
            await asyncio.wait((self._finish,))

    def release(self) -> None:
        """Forget the frames. A reader that is still there comes to its end."""
        if self._timer is not None:
            self._timer.cancel()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.wake()
        self._streams.kept_bytes -= self._kept_bytes
        self._lines.clear()
        self._kept_bytes = self._unsent_bytes = 0


class Streams:
    """All streams of this daemon, by sandbox and exec id."""

    def __init__(self, limits: StreamLimits, new_id: Callable[[], str]) -> None:
        self.limits = limits
        self.kept_bytes = 0
        self._new_id = new_id
        self._table: dict[tuple[str, str], ExecStream] = {}
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def open(
        self, sandbox_id: str, *, encoding: str, detach: bool, exec_id: str | None = None
    ) -> ExecStream:
        """A stream under ``exec_id`` or a fresh one; a command has to be begun on it, or it has to
        be discarded. Raises ExecIdTaken."""
        key = (sandbox_id, exec_id or self._new_id())
        if key in self._table:
            raise ExecIdTaken(f"the stream of an earlier command {exec_id!r} is still kept")
        stream = ExecStream(self, key, encoding=encoding, detach=detach)
        self._table[key] = stream
        return stream

    def find(self, sandbox_id: str, exec_id: str) -> ExecStream:
        """Raises ExecNotFound."""
        stream = self.get(sandbox_id, exec_id)
        if stream is None:
            raise ExecNotFound(
                f"no streamed exec {exec_id!r} in this sandbox, or not any more",
                hint="a stream can be resumed for a short while only",
            )
        return stream

    def get(self, sandbox_id: str, exec_id: str) -> ExecStream | None:
        return self._table.get((sandbox_id, exec_id))

    def has_ended(self, key: tuple[str, str]) -> None:
        self._ended[key] = None
        while len(self._ended) > ENDED_MAX:
            self.forget(next(iter(self._ended)))

    def forget(self, key: tuple[str, str]) -> None:
        self._ended.pop(key, None)
        stream = self._table.pop(key, None)
        if stream is not None:
            stream.release()

    def discard(self, stream: ExecStream) -> None:
        """One whose command could not be begun."""
        self.forget(stream.key)

    def close(self) -> None:
        for key in list(self._table):
            self.forget(key)
