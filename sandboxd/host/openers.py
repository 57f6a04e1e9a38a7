"""Opening host mounts for a launcher, each by a child: a source's file system may never answer."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sandboxd.host.children import Children
from sandboxd.host.mounts import open_mount
from sandboxd.launcher import protocol
from sandboxd.linux import namespaces
from sandboxd.model import MountRoot

OPENERS_MAX: Final = 64
"""Mounts that are waited for at once: each is a process that a file system may hold up."""


class Openers:
    def __init__(self, roots: Sequence[MountRoot]) -> None:
        self._roots = roots
        self._children: Children[None] = Children(OPENERS_MAX)

    @property
    def pidfds(self) -> list[int]:
        """Readable once one has ended; then it is for ``ended``."""
        return self._children.pidfds

    def open(self, sock: socket.socket, message: Mapping[str, Any], launcher_pid: int) -> None:
        """Have a launcher's ``mount`` answered."""
        if self._children.is_full:
            told = {"errno": errno.EAGAIN, "what": "too many are waited for already"}
            protocol.send(sock, {"id": message["id"], **told})
            return
        user_ns = namespaces.open_namespace(launcher_pid, "user")
        if not self._children.fork(None):
            os.close(user_ns)
            return
        try:
            answer, fds = _answer(self._roots, message, user_ns)
            protocol.send(sock, answer, fds)
        finally:
            os._exit(0)

    def ended(self, pidfd: int) -> None:
        self._children.ended(pidfd)

    def stop(self) -> None:
        """End them all. Idempotent."""
        self._children.stop()


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
