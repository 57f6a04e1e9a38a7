"""The daemon's side of the launcher's socket: calls, events, and connecting again when it is lost.

The messages are described in ``protocol.py``. The one file of this package where asyncio lives. Not
for what an answer means to a sandbox: that is ``sandboxd.runtime``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sandboxd.errors import (
    ImageInUse,
    NodeError,
    NodeUnavailable,
    NodeVersionMismatch,
    SandboxdError,
    subclasses,
)
from sandboxd.init.fingerprint import fingerprint
from sandboxd.init.protocol import close_fds
from sandboxd.launcher import protocol

log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 30.0
MOUNT_TIMEOUT_S: Final = 60.0
SEND_QUEUE_MAX: Final = 4096
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0


class Listener(Protocol):
    """Who is told what the launcher says unasked. All of it in the event loop's thread."""

    async def launcher_connected(self, hello: dict[str, Any]) -> None:
        """A connection stands; calls work. An error raised here closes it again."""

    def launcher_lost(self) -> None:
        """The connection is gone; every call waiting has failed."""

    def launcher_event(self, event: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class Answer:
    """``ok`` of an answer and the fds that came with it, which are the caller's to close."""

    ok: dict[str, Any]
    fds: list[int]

    def take_fds(self) -> list[int]:
        """All of them, the caller's now. Raises NodeError where there is none."""
        if not self.fds:
            raise NodeError("the launcher sent no file descriptor")
        taken, self.fds = self.fds, []
        return taken


def error_from_launcher(error: Any) -> SandboxdError:
    """The exception for an answer's ``error``; codes that are not in the tree become node-error."""
    if not isinstance(error, dict):
        return NodeError("the launcher failed without saying why")
    code = str(error.get("code", ""))
    message = str(error.get("message", "")) or "the launcher gave no reason"
    hint = error.get("hint")
    detail = error.get("detail")
    fields = {str(k): v for k, v in detail.items()} if isinstance(detail, dict) else {}
    for name in ("message", "hint", "self"):
        fields.pop(name, None)
    for kind in subclasses():
        if kind.code == code and kind is not SandboxdError:
            return kind(message, hint=str(hint) if hint else None, **fields)
    fields["launcher_code"] = code
    return NodeError(message, hint=str(hint) if hint else None, **fields)


class LauncherClient:
    """One connection to the launcher, kept up by one task. ``start`` needs a running event loop."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._sock: socket.socket | None = None
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._last_id = 0
        self._queue: deque[tuple[dict[str, Any], list[int]]] = deque()
        self._lost: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._refusal: NodeVersionMismatch | None = None

    @property
    def connected(self) -> bool:
        return self._sock is not None

    @property
    def refused(self) -> bool:
        """Whether the launcher is there, and of a version that it cannot speak to."""
        return self._refusal is not None

    def unavailable(self, message: str) -> NodeError:
        """Why nothing can be asked of it: one of another version will never answer."""
        if self._refusal is not None:
            return self._refusal.with_traceback(None)
        return NodeUnavailable(message)

    def start(self, listener: Listener) -> None:
        self._listener = listener
        self._task = asyncio.get_running_loop().create_task(self._keep_connected(listener))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._disconnect()

    # --- verbs -------------------------------------------------------------------------------

    async def call(
        self,
        verb: str,
        *,
        fds: Sequence[int] = (),
        timeout_s: float = CALL_TIMEOUT_S,
        **fields: Any,
    ) -> Answer:
        """Ask and wait.

        Raises the error of the answer; NodeUnavailable when there is no launcher or no answer in
        time (a late one is dropped, its fds closed).
        """
        loop = asyncio.get_running_loop()
        if self._sock is None:
            raise self.unavailable("the launcher is not connected")
        self._last_id += 1
        call_id = self._last_id
        future: asyncio.Future[Answer] = loop.create_future()
        self._calls[call_id] = future
        timer = loop.call_later(timeout_s, self._time_out, call_id, verb)
        try:
            self._send({"id": call_id, "verb": verb, **fields}, fds)
            return await future
        except asyncio.CancelledError:
            # The answer may have arrived in the very loop turn in which its waiter was cancelled.
            if future.done() and not future.cancelled() and future.exception() is None:
                close_fds(future.result().fds)
            raise
        finally:
            timer.cancel()
            self._calls.pop(call_id, None)

    def _time_out(self, call_id: int, verb: str) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_exception(NodeUnavailable(f"the launcher did not answer {verb!r} in time"))

    async def mount(
        self, key: str, name: str, sif_offset: int, sif_fd: int, digest: str = ""
    ) -> None:
        """Mount an image; returns when files can be read. The fd stays the caller's."""
        answer = await self.call(
            "mount",
            fds=(sif_fd,),
            timeout_s=MOUNT_TIMEOUT_S,
            key=key,
            name=name,
            digest=digest,
            sif_offset=sif_offset,
        )
        close_fds(answer.fds)

    async def unmount(self, key: str) -> bool:
        """Unmount an image; False while the launcher still has a user of it."""
        try:
            answer = await self.call("unmount", key=key)
        except ImageInUse:
            return False
        close_fds(answer.fds)
        return True

    async def list_sandboxes(self) -> list[protocol.SandboxRow]:
        """Every sandbox the launcher has, page by page."""
        rows: list[protocol.SandboxRow] = []
        while True:
            answer = await self.call("list", after=rows[-1].sandbox if rows else "")
            page = answer.ok.get("sandboxes") or []
            rows += [
                protocol.SandboxRow(
                    sandbox=str(row["sandbox"]),
                    pid=int(row["pid"]),
                    state=str(row["state"]),
                    images=tuple(row["images"]),
                    meta=dict(row["meta"]),
                    reason=str(row.get("reason", "")),
                )
                for row in page
            ]
            if not answer.ok.get("more") or not page:
                return rows

    async def list_snapshots(self) -> list[dict[str, Any]]:
        """Every snapshot the launcher has, page by page."""
        rows: list[dict[str, Any]] = []
        while True:
            answer = await self.call("snapshots", after=rows[-1]["snapshot"] if rows else "")
            page = answer.ok.get("snapshots") or []
            rows += page
            if not answer.ok.get("more") or not page:
                return rows

    async def list_kept(self) -> dict[str, dict[str, Any]]:
        """Every record that ``keep`` has left with the launcher, page by page."""
        rows: dict[str, dict[str, Any]] = {}
        after = ""
        while True:
            answer = await self.call("kept", after=after)
            page = answer.ok.get("kept") or []
            rows |= {str(name): dict(record) for name, record in page}
            if not answer.ok.get("more") or not page:
                return rows
            after = str(page[-1][0])

    # --- the connection ----------------------------------------------------------------------

    async def _keep_connected(self, listener: Listener) -> None:
        pause_s = BACKOFF_FIRST_S
        told = False
        while True:
            try:
                self._connect()
                await listener.launcher_connected(await self._hello())
            except Exception as error:  # noqa: BLE001 - whatever failed is tried again
                self._disconnect()
                self._refusal = error if isinstance(error, NodeVersionMismatch) else None
                if not told:
                    log.warning("no launcher at its socket: %s", error)
                    told = True
            else:
                told = False
                self._refusal = None
                pause_s = BACKOFF_FIRST_S
                if self._lost is not None:
                    await self._lost.wait()
                log.warning("the connection to the launcher is lost")
            listener.launcher_lost()
            # Spread out, as every daemon of a node may have lost the same launcher.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, BACKOFF_MAX_S)

    async def _hello(self) -> dict[str, Any]:
        answer = await self.call("hello", version=protocol.VERSION)
        version, init = answer.ok.get("version"), answer.ok.get("init")
        if version != protocol.VERSION or init != fingerprint():
            raise protocol.mismatch(f"{protocol.VERSION} ({fingerprint()})", f"{version} ({init})")
        return answer.ok

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self._lost = asyncio.Event()
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable, sock)

    def _disconnect(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock.fileno())
        loop.remove_writer(sock.fileno())
        sock.close()
        for _, fds in self._queue:
            close_fds(fds)
        self._queue.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(NodeUnavailable("the connection to the launcher was lost"))
        self._calls.clear()
        if self._lost is not None:
            self._lost.set()

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        sock = self._sock
        if sock is None:
            raise NodeUnavailable("the launcher is not connected")
        if not self._queue:
            try:
                protocol.send(sock, message, tuple(fds))
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(sock.fileno(), self._writable, sock)
            except ValueError as error:
                raise NodeError(str(error)) from error
            except OSError as error:
                self._disconnect()
                raise NodeUnavailable(f"the launcher does not take messages: {error}") from error
            else:
                return
        if len(self._queue) >= SEND_QUEUE_MAX:
            raise NodeUnavailable("the launcher does not take messages as fast as they come")
        self._queue.append((message, [os.dup(fd) for fd in fds]))

    def _writable(self, sock: socket.socket) -> None:
        while self._queue:
            message, fds = self._queue[0]
            try:
                protocol.send(sock, message, tuple(fds))
            except BlockingIOError:
                return
            except ValueError:
                log.exception("a message for the launcher was too large")
            except OSError:
                self._disconnect()
                return
            self._queue.popleft()
            close_fds(fds)
        asyncio.get_running_loop().remove_writer(sock.fileno())

    def _readable(self, sock: socket.socket) -> None:
        try:
            message, fds = protocol.receive(sock)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError) as error:
            log.error("the launcher's message cannot be read: %s", error)  # noqa: TRY400
            self._disconnect()
            return
        if message is None:
            close_fds(fds)
            self._disconnect()
        elif "event" in message:
            close_fds(fds)
            if self._listener is not None:
                self._listener.launcher_event(message)
        else:
            self._answered(message, fds)

    def _answered(self, message: dict[str, Any], fds: list[int]) -> None:
        call_id = message.get("id")
        future = self._calls.pop(call_id, None) if isinstance(call_id, int) else None
        if future is None or future.done():
            close_fds(fds)
            return
        ok = message.get("ok")
        if isinstance(ok, dict):
            future.set_result(Answer(ok, fds))
        else:
            close_fds(fds)
            future.set_exception(error_from_launcher(message.get("error")))
