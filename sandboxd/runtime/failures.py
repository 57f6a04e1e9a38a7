"""What a failed step in a sandbox means: the error to raise for a step and errno of ``protocol.h``.

The messages name what the caller gave (path, user, directory) and never what the node has. What is
not listed lies in the sandbox (``exec-setup-failed``, ``file-error``), but for the few steps whose
failure only the node can bring about.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from sandboxd.errors import (
    CommandTooLong,
    CwdNotFound,
    DiskFull,
    ExecSetupFailed,
    FileAccessDenied,
    FileError,
    FileNotFound,
    NodeError,
    NotARegularFile,
    PidsExhausted,
    RequestError,
    SandboxdError,
    TooManyExecs,
    UserNotFound,
)
from sandboxd.init.protocol import Failure, Step, errno_symbol, step_slug

_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT}

_FILE_ERRORS: Final[dict[int, type[FileError]]] = {
    errno.ENOENT: FileNotFound,
    errno.ENOTDIR: FileNotFound,
    errno.EACCES: FileAccessDenied,
    errno.EPERM: FileAccessDenied,
    errno.EROFS: FileAccessDenied,
    errno.EISDIR: NotARegularFile,
    errno.ENXIO: NotARegularFile,
    errno.ENODEV: NotARegularFile,
}


def _words(err: int) -> str:
    return os.strerror(err).lower()


def has_run(failure: Failure) -> bool:
    """Whether there is a result: a program that cannot be found or executed is one (127, 126)."""
    return failure.step == Step.STEP_NONE or (
        failure.step == Step.STEP_EXEC and failure.err != errno.E2BIG
    )


def exit_code(status: int) -> tuple[int, int | None]:
    """Exit code and signal of a wait4(2) status; death by signal n is 128+n."""
    number = status & 0x7F
    return (128 + number, number) if number else ((status >> 8) & 0xFF, None)


def exec_failure(failure: Failure, *, user: str, cwd: str) -> SandboxdError:
    """The error for a command that could not be started."""
    step, err = failure.step, failure.err
    detail = {"step": step_slug(step), "errno": errno_symbol(err)}
    if step == Step.STEP_TABLE_FULL:
        return TooManyExecs("the sandbox runs as many commands at once as it can", **detail)
    if err == errno.E2BIG or (step == Step.STEP_MESSAGE and err == errno.EMSGSIZE):
        return CommandTooLong("arguments and environment are too long for the kernel", **detail)
    if step == Step.STEP_CLONE and err == errno.EAGAIN:
        return PidsExhausted("the sandbox is at its process limit", **detail)
    if step in (Step.STEP_USER, Step.STEP_GROUP):
        return UserNotFound(f"no user {user!r} in the sandbox: {_words(err)}", user=user, **detail)
    if err in _NO_ROOM and step != Step.STEP_EXEC_CGROUP:
        return DiskFull("the sandbox's writable layer is full", **detail)
    if step == Step.STEP_CWD:
        return CwdNotFound(f"working directory {cwd!r}: {_words(err)}", cwd=cwd, **detail)
    if step in (Step.STEP_EXEC_CGROUP, Step.STEP_STARTED, Step.STEP_MESSAGE):
        # Cgroups of the node's own tree and fds in flight: nothing of the sandbox counts there.
        return NodeError(f"the command could not be started: {_words(err)}", **detail)
    return ExecSetupFailed(
        f"the command could not be started ({step_slug(step)}): {_words(err)}", **detail
    )


def file_failure(failure: Failure, *, user: str, path: str) -> SandboxdError:
    """The error for a file operation that did not succeed."""
    step, err = failure.step, failure.err
    detail = {"step": step_slug(step), "errno": errno_symbol(err)}
    if step == Step.STEP_FILE_TYPE:
        return NotARegularFile(f"{path!r} is not a regular file", path=path, **detail)
    if step == Step.STEP_FILE_LENGTH:
        return RequestError("the body was shorter than it said", path=path, **detail)
    if err in _NO_ROOM:
        return DiskFull("the sandbox's writable layer is full", path=path, **detail)
    if step in (
        Step.STEP_FILE_OPEN,
        Step.STEP_FILE_READ,
        Step.STEP_FILE_WRITE,
        Step.STEP_FILE_RENAME,
    ):
        kind = _FILE_ERRORS.get(err, FileError)
        return kind(f"{path!r}: {_words(err)}", path=path, **detail)
    return exec_failure(failure, user=user, cwd="/")
