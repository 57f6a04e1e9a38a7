"""Who owns a runtime directory: a lock that ends with the last process of its owner's node.

A daemon with a hostd of its own holds it exclusively, and hostd inherits it: it is free when both
are gone. So a daemon that starts the moment another was killed waits until that one's node is taken
down, instead of taking its dying launcher for one that serves. A hostd that is a unit of its own
holds it shared, and says so in the file: daemons may come and go beside it.
"""

from __future__ import annotations

import fcntl
import os
import select
import time
from typing import Final

from sandboxd.errors import ConfigError

NAME: Final = "node.lock"
UNIT: Final = b"unit"
WAIT_S: Final = 30.0
"""For the node of a daemon that has ended: hostd gives its parts 10 s and their cgroups as much."""
_PAUSE_S: Final = 0.05  # nobody tells when a lock that was inherited is free


def claim(runtime_dir: str) -> int | None:
    """The lock's fd, close-on-exec, for a daemon that is to start a node; None where a hostd of its
    own unit has the directory.

    Raises ConfigError where another daemon lives there.
    """
    fd = _open(runtime_dir)
    deadline = time.monotonic() + WAIT_S
    while not _locked(fd, fcntl.LOCK_EX):
        owner = os.pread(fd, 32, 0)
        if owner == UNIT:
            os.close(fd)
            return None
        if _lives(owner) or time.monotonic() > deadline:
            os.close(fd)
            raise ConfigError(
                f"another sandboxd serves in {runtime_dir}",
                hint="stop it first, or give this one another --runtime-dir",
            )
        time.sleep(_PAUSE_S)
    _sign(fd, str(os.getpid()).encode())
    return fd


def share(runtime_dir: str) -> int:
    """The lock's fd for a hostd that is a unit of its own.

    Raises ConfigError where a daemon has the directory with a node of its own.
    """
    fd = _open(runtime_dir)
    if not _locked(fd, fcntl.LOCK_SH):
        os.close(fd)
        raise ConfigError(
            f"a sandboxd with a node of its own serves in {runtime_dir}", hint="stop it first"
        )
    _sign(fd, UNIT)
    return fd


def _open(runtime_dir: str) -> int:
    return os.open(
        os.path.join(runtime_dir, NAME),
        os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
        0o600,
    )


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(fd: int, owner: bytes) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, owner, 0)


def _lives(owner: bytes) -> bool:
    """Whether the daemon that wrote its pid is there, and more than a zombie."""
    if not owner.isdigit():
        return False
    try:
        pidfd = os.pidfd_open(int(owner))
    except ProcessLookupError:
        return False
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return not poller.poll(0)
    finally:
        os.close(pidfd)
