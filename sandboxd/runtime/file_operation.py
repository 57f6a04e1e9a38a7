"""One file operation of a sandbox's PID 1 on its way, and the pipe between it and us.

The work is done by a child of PID 1, as the asked user, inside the sandbox's root; the pipe is of
our making. Never a path of the host. What comes over it is as untrusted as what PID 1 says.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from typing import Any, Final, Self

from sandboxd.errors import FileKilled, FileStalled, SandboxdError, SandboxExclusive
from sandboxd.init import protocol
from sandboxd.init.protocol import Exited, FileOp, KillScope, MsgType, ProtocolError, Step
from sandboxd.runtime.control import Control
from sandboxd.runtime.file_failures import file_failure

PIPE_BYTES: Final = 256 * 1024
STALL_S: Final = 60.0
"""Without a byte moving at the sandbox's side. More than the launcher takes to find and kill an
image's server that does not answer, which ends the sandbox."""
TREE_S: Final = 600.0
"""The same for what works through a whole tree before it says anything."""
DISCARD_S: Final = 5.0
"""What the child of a broken upload may take to remove its part of the file."""

_INWARD: Final = (FileOp.FILE_WRITE, FileOp.FILE_UNPACK)
_REPORTING: Final = (FileOp.FILE_PACK, FileOp.FILE_UNPACK)


def shown(path: bytes) -> str:
    """A path for a message: what is no UTF-8 in it is replaced."""
    return path.decode("utf-8", "replace")


class FileOperation:
    """``close`` it in any case (a context manager)."""

    stall_s = STALL_S

    def __init__(self, control: Control, user: str, path: bytes, other: bytes = b"") -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._user = user
        self._path = path
        self._other = other
        self._fd = -1
        self._report_fd = -1
        self._id = 0
        self.place: bytes | None = None
        """What below the path it was at when it failed, as far as that is known."""
        self.exited: asyncio.Future[Exited] = self._loop.create_future()

    def _start(self, op: FileOp, **request: Any) -> None:
        payload = protocol.file_payload(
            op, user=self._user, path=self._path, other=self._other, **request
        )
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        ours, theirs = (write_fd, read_fd) if op in _INWARD else (read_fd, write_fd)
        fds = [theirs]
        self._fd = ours
        try:
            # Only our end: the child's reads and writes are plain blocking ones.
            os.set_blocking(ours, False)
            # EPERM when the user's pipe pages are used up: slower then, not wrong.
            with contextlib.suppress(OSError):
                fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            if op in _REPORTING:
                self._report_fd, write_fd = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(self._report_fd, False)
                fds.append(write_fd)
            self._id = self._control.register(self)
            try:
                self._control.send(MsgType.M_FILE, self._id, payload, fds=fds)
            except BaseException:
                self._control.forget(self._id)
                raise
        except BaseException:
            self._close_fds()
            raise
        finally:
            protocol.close_fds(fds)

    # --- what PID 1 says ---------------------------------------------------------------------

    def reply(self, kind: int, payload: bytes, fds: list[int]) -> None:
        protocol.close_fds(fds)
        if kind == MsgType.R_EXIT:
            self._control.forget(self._id)
            exited = protocol.unpack_exited(payload)
            if exited.status & 0x7F == signal.SIGKILL and self._control.alone:
                self.lost(self._ousted())
            elif not self.exited.done():
                self.exited.set_result(exited)
        elif kind == MsgType.R_FAILED:
            failure = protocol.unpack_failure(payload)
            self.lost(file_failure(failure, user=self._user, path=shown(self._path)))
        elif kind != MsgType.R_STARTED:
            raise ProtocolError(f"reply {kind} to a file operation")

    def lost(self, error: SandboxdError) -> None:
        self._control.forget(self._id)
        if not self.exited.done():
            self.exited.set_exception(error)
            self.exited.exception()

    async def finished(self) -> Exited:
        """How it ended. Raises the error that its failure means."""
        try:
            async with asyncio.timeout(self.stall_s):
                exited = await asyncio.shield(self.exited)
        except TimeoutError:
            raise self._stalled() from None
        failure = exited.failure
        if failure.step != Step.STEP_NONE:
            self._read_report()
            raise file_failure(
                failure,
                user=self._user,
                path=shown(self._path),
                other=shown(self._other),
                place=None if self.place is None else shown(self.place),
            )
        if exited.status != 0:
            # The kernel's OOM killer, or something in the sandbox, killed the child.
            raise FileKilled(f"{shown(self._path)!r}: the file operation was killed")
        return exited

    def _read_report(self) -> None:
        if self._report_fd < 0:
            return
        with contextlib.suppress(OSError, ProtocolError):
            # Written at once, by a process that has ended: all of it is there.
            found = protocol.unpack_entry(os.read(self._report_fd, protocol.ENTRY_PATH_MAX * 2))
            if found is not None:
                self.place = found[0].path

    def _ousted(self) -> SandboxdError:
        return SandboxExclusive(f"{shown(self._path)!r}: an exclusive command came between")

    def _stalled(self) -> SandboxdError:
        if self._control.alone:
            return self._ousted()
        return FileStalled(
            f"{shown(self._path)!r}: the sandbox has not gone on with it for {self.stall_s:g} s"
        )

    def _broken(self, error: ProtocolError) -> SandboxdError:
        # By the child, that is as the sandbox's user: never the node's doing.
        return FileKilled(f"{shown(self._path)!r}: the file operation gave nonsense: {error}")

    # --- the pipe ----------------------------------------------------------------------------

    async def _read(self) -> bytes:
        """Some bytes; none at the end."""
        while True:
            try:
                return os.read(self._fd, PIPE_BYTES)
            except BlockingIOError:
                await self._ready(writing=False)

    async def write(self, data: bytes | memoryview) -> bool:
        """Pass bytes on; False when the sandbox's side wants no more, and ``finish`` says why."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                await self._ready(writing=True)
            except BrokenPipeError:
                return False
        return True

    async def _ready(self, *, writing: bool) -> None:
        """Wait until the pipe can be used (or has lost its other end)."""
        future: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        fd = self._fd
        if writing:
            self._loop.add_writer(fd, wake)
        else:
            self._loop.add_reader(fd, wake)
        try:
            async with asyncio.timeout(self.stall_s):
                await future
        except TimeoutError:
            raise self._stalled() from None
        finally:
            if writing:
                self._loop.remove_writer(fd)
            else:
                self._loop.remove_reader(fd)

    # --- its end -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the pipe, and of the child if it is still there. Idempotent."""
        self._close_fds()
        self._kill()

    def abandon(self) -> None:
        """Kill the child; whoever waits for it hears of that. For a client that went away."""
        if not self.exited.done():
            with contextlib.suppress(SandboxdError):
                self._control.kill(self._id, signal.SIGKILL, KillScope.KILL_TREE)

    def _kill(self) -> None:
        if not self.exited.done():
            self.abandon()
            self._control.forget(self._id)
            self.exited.cancel()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _close_fds(self) -> None:
        self._close_fd()
        if self._report_fd >= 0:
            os.close(self._report_fd)
            self._report_fd = -1
