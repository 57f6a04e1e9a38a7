"""What is being read, so that nobody collects it. A reader's matter; see the package's docstring.

A lease lives as long as its holder touches `alive`. A holder that dies holds what it held for
`LEASE_S` more, which costs room and nothing else.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from sif_tools.store.files import make_parents, server_time
from sif_tools.store.layout import Layout

TOUCH_EVERY_S: Final = 300.0
LEASE_S: Final = 6 * 3600.0
"""Long, so that a file server's outage of hours ends no lease under living sandboxes."""

_ALIVE: Final = "alive"


class LeaseHolder:
    """One reader's leases. Every method raises OSError where the store cannot be written."""

    def __init__(self, layout: Layout) -> None:
        name = f"{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(8)}"
        self._directory = layout.leases / name
        self._held: set[str] = set()

    def take(self, digest: str) -> None:
        """Lease a SIF by its digest; twice is once."""
        path = self._directory / digest
        make_parents(path)
        self.touch()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        self._held.add(digest)

    def drop(self, digest: str) -> None:
        self._held.discard(digest)
        with suppress(FileNotFoundError):
            (self._directory / digest).unlink()

    def touch(self) -> None:
        """Say that we live; at least every TOUCH_EVERY_S."""
        fd = os.open(self._directory / _ALIVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.utime(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give all leases back."""
        for digest in list(self._held):
            self.drop(digest)
        with suppress(FileNotFoundError):
            (self._directory / _ALIVE).unlink()
        with suppress(OSError):
            self._directory.rmdir()


def leased(layout: Layout, lease_s: float = LEASE_S) -> tuple[set[str], list[Path]]:
    """The digests of all living leases, and the directories of holders that are dead."""
    try:
        holders = [layout.leases / name for name in os.listdir(layout.leases)]
    except FileNotFoundError:
        return set(), []
    now = server_time(layout.leases) if holders else 0.0
    digests: set[str] = set()
    dead: list[Path] = []
    for holder in holders:
        if holder.name.startswith("."):
            continue
        try:
            touched_at = os.stat(holder / _ALIVE).st_mtime
            names = os.listdir(holder)
        except (FileNotFoundError, NotADirectoryError):
            # Made a moment ago, or given back this moment.
            with suppress(FileNotFoundError, NotADirectoryError):
                digests.update(os.listdir(holder))
            continue
        if now - touched_at > lease_s:
            dead.append(holder)
        else:
            digests.update(names)
    digests.discard(_ALIVE)
    return digests, dead
