"""Whole files of a sandbox, in and out as streams, at constant memory.

The file is opened by a child of the sandbox's PID 1, as the asked user, inside the sandbox's root;
between it and us is a pipe of our making. Never a path of the host.

A read is known to be good only at its end (R_EXIT), when its head may be on its way to the caller
already. So its first bytes are held back until the whole file is there or ``HEAD_BYTES`` are: small
files fail with a clean error, large ones by a broken stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from typing import Final, Self

from sandboxd.errors import FileError, FileStalled, SandboxdError
from sandboxd.init import protocol
from sandboxd.init.protocol import Exited, FileFlag, FileOp, KillScope, MsgType, ProtocolError, Step
from sandboxd.model import FileInfo
from sandboxd.runtime.control import Control
from sandboxd.runtime.failures import file_failure

PIPE_BYTES: Final = 256 * 1024
HEAD_BYTES: Final = 256 * 1024
STALL_S: Final = 60.0
"""Without a byte moving at the sandbox's side. More than the launcher takes to find and kill an
image's server that does not answer, which ends the sandbox."""
DISCARD_S: Final = 5.0
"""What the child of a broken upload may take to remove its part of the file."""


class _FileOperation:
    """One M_FILE on its way; ``exited`` ends with what R_EXIT said, or with the error it means."""

    def __init__(self, control: Control, user: str, path: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._user = user
        self._path = path
        self._fd = -1
        self.exited: asyncio.Future[Exited] = self._loop.create_future()

    def _start(self, op: FileOp, *, flags: int = 0, mode: int = 0, length: int = 0) -> None:
        payload = protocol.file_payload(
            op, user=self._user, path=self._path, flags=flags, mode=mode, length=length
        )
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        ours, theirs = (read_fd, write_fd) if op is FileOp.FILE_READ else (write_fd, read_fd)
        self._fd = ours
        try:
            # Only our end: the child's reads and writes are plain blocking ones.
            os.set_blocking(ours, False)
            # EPERM when the user's pipe pages are used up: slower then, not wrong.
            with contextlib.suppress(OSError):
                fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._id = self._control.register(self)
            try:
                self._control.send(MsgType.M_FILE, self._id, payload, fds=(theirs,))
            except BaseException:
                self._control.forget(self._id)
                raise
        except BaseException:
            self._close_fd()
            raise
        finally:
            os.close(theirs)

    def reply(self, kind: int, payload: bytes, fds: list[int]) -> None:
        protocol.close_fds(fds)
        if kind == MsgType.R_EXIT:
            exited = protocol.unpack_exited(payload)
            failure = exited.failure
            if failure.step != Step.STEP_NONE:
                self._fail(file_failure(failure, user=self._user, path=self._path))
            elif exited.status != 0:
                # The kernel's OOM killer, or something in the sandbox, killed the child.
                self._fail(FileError(f"{self._path!r}: the file operation was killed"))
            else:
                self._control.forget(self._id)
                if not self.exited.done():
                    self.exited.set_result(exited)
        elif kind == MsgType.R_FAILED:
            failure = protocol.unpack_failure(payload)
            self._fail(file_failure(failure, user=self._user, path=self._path))
        elif kind != MsgType.R_STARTED:
            raise ProtocolError(f"reply {kind} to a file operation")

    def lost(self, error: SandboxdError) -> None:
        self._fail(error)

    def _fail(self, error: SandboxdError) -> None:
        self._control.forget(self._id)
        if not self.exited.done():
            self.exited.set_exception(error)
            self.exited.exception()

    async def _wait_exited(self) -> Exited:
        try:
            async with asyncio.timeout(STALL_S):
                return await asyncio.shield(self.exited)
        except TimeoutError:
            raise self._stalled() from None

    def _stalled(self) -> SandboxdError:
        return FileStalled(f"{self._path!r}: the sandbox has not gone on with it for {STALL_S:g} s")

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the pipe, and of the child if it is still there. Idempotent."""
        self._close_fd()
        self._kill()

    def _kill(self) -> None:
        if not self.exited.done():
            with contextlib.suppress(SandboxdError):
                self._control.kill(self._id, signal.SIGKILL, KillScope.KILL_TREE)
            self._control.forget(self._id)
            self.exited.cancel()

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
            async with asyncio.timeout(STALL_S):
                await future
        except TimeoutError:
            raise self._stalled() from None
        finally:
            if writing:
                self._loop.remove_writer(fd)
            else:
                self._loop.remove_reader(fd)


class FileRead(_FileOperation):
    """A file on its way out. After ``open``: ``head`` is its beginning, and the whole of it where
    ``info`` is set; ``rest`` gives what follows. ``close`` it in any case."""

    head: bytes = b""
    info: FileInfo | None = None

    @classmethod
    async def open(cls, control: Control, *, user: str, path: str) -> FileRead:
        """Raises FileNotFound, FileAccessDenied, NotARegularFile, UserNotFound …"""
        read = cls(control, user, path)
        read._start(FileOp.FILE_READ, length=(1 << 64) - 1)
        try:
            await read._fill_head()
        except BaseException:
            read.close()
            raise
        return read

    async def _fill_head(self) -> None:
        head = bytearray()
        while len(head) < HEAD_BYTES:
            data = await self._read()
            if not data:
                self.info = _info(await self._wait_exited())
                break
            head += data
        self.head = bytes(head)

    async def _read(self) -> bytes:
        while True:
            try:
                return os.read(self._fd, PIPE_BYTES)
            except BlockingIOError:
                await self._ready(writing=False)

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows ``head``. Raises like ``open`` when reading failed on the way."""
        if self.info is None:
            while data := await self._read():
                yield data
            self.info = _info(await self._wait_exited())


class FileWrite(_FileOperation):
    """A file on its way in: ``open``, ``write`` exactly ``length`` bytes, ``finish``. ``close`` it
    in any case (a context manager): a file of which less came is not put in place."""

    @classmethod
    def open(
        cls,
        control: Control,
        *,
        user: str,
        path: str,
        length: int,
        mode: int | None = None,
        parents: bool = True,
    ) -> FileWrite:
        write = cls(control, user, path)
        flags = 0
        if parents:
            flags |= FileFlag.FILE_PARENTS
        if mode is not None:
            flags |= FileFlag.FILE_MODE
        write._start(FileOp.FILE_WRITE, flags=flags, mode=mode or 0, length=length)
        return write

    async def write(self, data: bytes) -> bool:
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

    def close(self) -> None:
        """Let go of the pipe. At its end the child removes what it has written so far, which a kill
        would leave in the sandbox: so it is killed only if it does not end by itself."""
        self._close_fd()
        if not self.exited.done():
            self._loop.call_later(DISCARD_S, self._kill)

    async def finish(self) -> FileInfo:
        """The file as it is now. Raises like ``FileRead.open``, and DiskFull."""
        self._close_fd()
        return _info(await self._wait_exited())


def _info(exited: Exited) -> FileInfo:
    return FileInfo(
        size_bytes=exited.size,
        mode=exited.mode & 0o7777,
        uid=exited.uid,
        gid=exited.gid,
        mtime_ns=exited.mtime_ns,
    )
