"""The children of hostd that open mounts: a source's file system may never answer, and hostd must.

Each answers the launcher itself, over hostd's socket, where a message is whole whoever sends it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sandboxd.host.mounts import open_mount
from sandboxd.launcher import protocol
from sandboxd.linux import namespaces
from sandboxd.linux.pidfd import kill_within
from sandboxd.model import MountRoot

OPENERS_MAX: Final = 64
"""Mounts that are waited for at once: each is a process that a file system may hold up."""
END_S: Final = 1.0


class Openers:
    def __init__(self, roots: Sequence[MountRoot]) -> None:
        self._roots = roots
        self._pids: dict[int, int] = {}
        """Of the children that open a mount, or have, by pidfd."""

    @property
    def pidfds(self) -> list[int]:
        """Readable once one has ended; then it is for ``ended``."""
        return list(self._pids)

    def open(self, sock: socket.socket, message: Mapping[str, Any], launcher_pid: int) -> None:
        """Have a launcher's ``mount`` answered."""
        if len(self._pids) == OPENERS_MAX:
            told = {"errno": errno.EAGAIN, "what": "too many are waited for already"}
            protocol.send(sock, {"id": message["id"], **told})
            return
        user_ns = namespaces.open_namespace(launcher_pid, "user")
        pid = os.fork()
        if pid:
            os.close(user_ns)
            self._pids[os.pidfd_open(pid)] = pid
            return
        try:
            answer, fds = _answer(self._roots, message, user_ns)
            protocol.send(sock, answer, fds)
        finally:
            os._exit(0)

    def ended(self, pidfd: int) -> None:
        os.waitpid(self._pids.pop(pidfd), 0)
        os.close(pidfd)

    def stop(self) -> None:
        """End them all. Idempotent."""
        for pidfd in self.pidfds:
            if kill_within(pidfd, END_S):
                self.ended(pidfd)
            else:  # a file system holds it up; whoever is its parent then sees its end
                os.close(pidfd)
                del self._pids[pidfd]


def _answer(
    roots: Sequence[MountRoot], message: Mapping[str, Any], user_ns: int
) -> tuple[dict[str, Any], tuple[int, ...]]:
    number = message["id"]
    try:
        found = open_mount(
            roots, str(message["source"]), writable=bool(message["writable"]), user_ns=user_ns
        )
    except OSError as error:
        known = error.errno or errno.EIO
        return {"id": number, "errno": known, "what": error.strerror or str(error)}, ()
    told = {"id": number, "directory": found.directory, "mapped": found.mapped}
    return told, (found.fd,)
