"""Runs a function in a short-lived forked child, with a deadline, and in namespaces of its own.

For: trying what the kernel can do (``probes``) without a mark on the caller. Not for sandboxes.
The caller should have one thread: the child runs Python after fork(2).

Steps of a child that unshares, in order::

    child                                 parent
    unshare(flags)
    "unshared"  ------------------------> prepare(pid): id maps are written from outside
                <------------------------ "go"
    become root of the user namespace     (after the maps: unmapped ids cannot be set)
    dumpable, parent-death signal         (after the ids: a change of them clears both)
    mounts private
    function()  -- result as JSON ------> result(timeout_s)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

from sandboxd.linux import _libc, mount, namespaces, pidfd, process

RESULT_MAX_BYTES: Final = 32 * 1024
"""Fits a pipe's buffer, so the child never waits for its reader."""

KILL_WAIT_S: Final = 1.0
"""For a killed child to end. One stuck in the kernel is left behind rather than waited for."""


class ChildError(Exception):
    """The function in the child raised something other than an OSError, or the child was killed."""


class Child:
    """A running child; ``running`` makes one."""

    def __init__(self, pid: int, result_fd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd.pidfd_open(pid)
        self._result_fd = result_fd

    def result(self, timeout_s: float) -> Any:
        """What the function returned. Raises its OSError, ChildError, or TimeoutError."""
        ended = pidfd.reap(self.pidfd, timeout_s)
        if ended is None:
            raise _libc.oserror(errno.ETIMEDOUT, f"no answer in {timeout_s:g} s")
        data = os.read(self._result_fd, RESULT_MAX_BYTES)
        if not data:
            how = "signal" if ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else "status"
            raise ChildError(f"ended with {how} {ended.si_status} and no answer")
        answer = json.loads(data)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["strerror"], answer["what"])
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        """Kill the child if it still runs, and give back what it took."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            pidfd.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            pidfd.reap(self.pidfd, KILL_WAIT_S)
        os.close(self.pidfd)
        os.close(self._result_fd)


@contextlib.contextmanager
def running(
    function: Callable[[], Any],
    unshare_flags: int = 0,
    prepare: Callable[[int], None] | None = None,
) -> Iterator[Child]:
    """Start ``function`` in a child, which is killed at the end of the block if need be.

    ``prepare`` runs in the parent with the child's pid, once the child has unshared.
    """
    result_read, result_write = os.pipe()
    ours, theirs = socket.socketpair()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(result_read)
        ours.close()
        _child(function, unshare_flags, parent_pid, theirs, result_write)
    os.close(result_write)
    theirs.close()
    child = Child(pid, result_read)
    try:
        with ours:
            if ours.recv(1) and prepare is not None:
                prepare(pid)
            with contextlib.suppress(BrokenPipeError):  # it failed to unshare; result() says why
                ours.send(b"g", socket.MSG_NOSIGNAL)
        yield child
    finally:
        child.close()


def run(
    function: Callable[[], Any],
    timeout_s: float,
    unshare_flags: int = 0,
    prepare: Callable[[int], None] | None = None,
) -> Any:
    """The result of ``function`` run in a child; see ``running`` and ``Child.result``."""
    with running(function, unshare_flags, prepare) as child:
        return child.result(timeout_s)


def _child(
    function: Callable[[], Any],
    unshare_flags: int,
    parent_pid: int,
    gate: socket.socket,
    result_fd: int,
) -> None:
    try:
        try:
            if unshare_flags:
                namespaces.unshare(unshare_flags)
            gate.send(b"u")
            if not gate.recv(1):
                os._exit(1)  # the parent could not prepare, or is gone
            gate.close()
            if unshare_flags & namespaces.CLONE_NEWUSER:
                become_root()
            process.set_dumpable(True)
            process.set_parent_death_signal(signal.SIGKILL, parent_pid)
            if unshare_flags & namespaces.CLONE_NEWNS:
                mount.mount(None, "/", None, mount.MS_REC | mount.MS_PRIVATE)
            answer = {"ok": function()}
        except OSError as error:
            answer = {
                "errno": error.errno or errno.EIO,
                "strerror": error.strerror or str(error),
                "what": _text(error.filename),
            }
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent is to hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(result_fd, json.dumps(answer).encode()[:RESULT_MAX_BYTES])
    finally:
        # Not even SystemExit may climb into the parent's frames, which this process has a copy of.
        os._exit(0)


def _text(name: object) -> str:
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else str(name or "")


def become_root() -> None:
    """Take ids 0 of a user namespace whose maps have been written."""
    namespaces.drop_groups()
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
