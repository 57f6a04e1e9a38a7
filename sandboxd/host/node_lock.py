"""Who owns a runtime directory: a lock that ends with the last process of its owner's node.

A daemon with a hostd of its own holds it, and hostd inherits it: it is free when both are gone. So
a daemon that starts the moment another was killed waits until that one's node is taken down,
instead of taking its dying launcher for one that serves. A hostd that is a unit of its own holds it
too, and says so in the file: daemons may come and go beside it, one at a time (``claim_api``).
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import Final

from sandboxd.errors import ConfigError, NodeUnavailable
from sandboxd.linux import pidfd

NAME: Final = "node.lock"
API_NAME: Final = "api.lock"
UNIT: Final = b"unit"
WAIT_S: Final = 30.0
"""For the node of a daemon that has ended: hostd gives its parts 10 s and their cgroups as much."""
_PAUSE_S: Final = 0.05  # nobody tells when a lock that was inherited is free


def claim(runtime_dir: str) -> int | None:
    """The lock's fd, close-on-exec, for a daemon that is to start a node; None where a hostd of its
    own unit has the directory.

    Raises ConfigError where another daemon lives there.
    """
    fd = _take(os.path.join(runtime_dir, NAME), runtime_dir)
    if fd is not None:
        _sign(fd, str(os.getpid()).encode())
    return fd


def claim_for_unit(runtime_dir: str) -> int:
    """The lock's fd for a hostd that is a unit of its own.

    Raises ConfigError where another node has the directory.
    """
    fd = _take(os.path.join(runtime_dir, NAME), runtime_dir)
    if fd is None:
        raise ConfigError(f"another node serves in {runtime_dir}", hint="stop it first")
    _sign(fd, UNIT)
    return fd


def make_api_lock(runtime_dir: str, uid: int, gid: int) -> None:
    """The file that ``claim_api`` locks, for the account that the API runs as."""
    fd = _open(os.path.join(runtime_dir, API_NAME))
    try:
        os.fchown(fd, uid, gid)
    finally:
        os.close(fd)


def claim_api(runtime_dir: str) -> int:
    """The right to be the one daemon of a node that is a unit of its own; ends with this process.

    Waits for the node's first start. Raises NodeUnavailable where there is none, ConfigError where
    another daemon lives.
    """
    path = os.path.join(runtime_dir, API_NAME)
    deadline = time.monotonic() + WAIT_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise NodeUnavailable(
                f"no node serves in {runtime_dir}", hint="start sandboxd-node (sandboxd node)"
            )
        time.sleep(_PAUSE_S)
    fd = _take(path, runtime_dir)
    assert fd is not None  # no hostd signs this one
    _sign(fd, str(os.getpid()).encode())
    return fd


def _take(path: str, runtime_dir: str) -> int | None:
    """The locked file; None where a unit holds it."""
    fd = _open(path)
    deadline = time.monotonic() + WAIT_S
    while not _locked(fd):
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
    return fd


def claim_if_free(runtime_dir: str) -> int | None:
    """The lock's fd if nobody has it; None if a node lives there. Does not wait."""
    fd = _open(os.path.join(runtime_dir, NAME))
    if _locked(fd):
        return fd
    os.close(fd)
    return None


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    fd = pidfd.open_living(int(owner))
    if fd is None:
        return False
    try:
        return not pidfd.wait_ended(fd, 0)
    finally:
        os.close(fd)
