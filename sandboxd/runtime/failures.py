"""What a failed step in a sandbox means: the error to raise for a step and errno of ``protocol.h``.

The messages name what the caller gave (path, user, directory) and never what the node has. What is
not listed lies in the sandbox (``exec-setup-failed``), but for the few steps whose
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
    NodeError,
    OomKilled,
    PidsExhausted,
    SandboxDead,
    SandboxdError,
    SandboxLost,
    TooManyExecs,
    UserNotFound,
    UserNotMapped,
)
from sandboxd.init.protocol import Failure, Step, errno_symbol, step_slug

NODE_LOST: Final = "node-lost"
"""Why PID 1 is gone where a part of the node has died, which takes every sandbox along."""

NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT}


_NOT_RUN: Final = {errno.E2BIG, errno.EAGAIN}
"""EAGAIN of execve(2): its user is above RLIMIT_NPROC, by which processes are held where there are
no cgroups."""


def words(err: int) -> str:
    return os.strerror(err).lower()


def has_run(failure: Failure) -> bool:
    """Whether there is a result: a program that cannot be found or executed is one (127, 126)."""
    return failure.step == Step.STEP_NONE or (
        failure.step == Step.STEP_EXEC and failure.err not in _NOT_RUN
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
    if step in (Step.STEP_CLONE, Step.STEP_EXEC) and err == errno.EAGAIN:
        return PidsExhausted("the sandbox is at its process limit", **detail)
    if step in (Step.STEP_USER, Step.STEP_GROUP):
        return UserNotFound(f"no user {user!r} in the sandbox: {words(err)}", user=user, **detail)
    if step == Step.STEP_TTY and err in NO_ROOM:
        return ExecSetupFailed(
            "the sandbox has as many terminals open as it may",
            hint="end what holds them; kernel_caps.ptys of the node says how many",
            **detail,
        )
    if err in NO_ROOM and step != Step.STEP_EXEC_CGROUP:
        return DiskFull("the sandbox's writable layer is full", **detail)
    if step == Step.STEP_CWD:
        return CwdNotFound(f"working directory {cwd!r}: {words(err)}", cwd=cwd, **detail)
    if err == errno.ENOMEM:
        # The kernel's memory of a sandbox counts as the sandbox's: its limit is what it met.
        return OomKilled("the sandbox has no memory left to start it with", **detail)
    if step == Step.STEP_CREDENTIALS and err == errno.EINVAL:
        return UserNotMapped(
            f"user {user!r}: this node has no such id for its sandboxes",
            hint="run it as root, or on a node whose ids are a range",
            user=user,
            **detail,
        )
    if step in (Step.STEP_EXEC_CGROUP, Step.STEP_STARTED, Step.STEP_MESSAGE):
        # Cgroups of the node's own tree and fds in flight: nothing of the sandbox counts there.
        return NodeError(f"the command could not be started: {words(err)}", **detail)
    return ExecSetupFailed(
        f"the command could not be started ({step_slug(step)}): {words(err)}", **detail
    )


def death(reason: str) -> SandboxdError:
    """What a sandbox has failed with, by the launcher's word on why."""
    if reason == "image-lost":
        return SandboxLost("the image's file system server died", reason=reason)
    if reason == NODE_LOST:
        return SandboxLost("a part of the node died, and the sandbox with it", reason=reason)
    if reason == "pids-exhausted":
        return PidsExhausted("the sandbox had more processes than it may: all ended", reason=reason)
    if reason == "oom-killed":
        return OomKilled("the sandbox ran out of memory and lost its PID 1", reason=reason)
    return SandboxDead("the sandbox's PID 1 is gone", reason=reason)
