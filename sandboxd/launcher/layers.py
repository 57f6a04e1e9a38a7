"""Writable layers and what stacks of them are kept: the state behind snapshot, rollback and fork.

A layer is a tmpfs, or what ``staging`` has in its place. While a sandbox writes to it it is that
sandbox's upper; a snapshot freezes it, and from then on it is a lower of whoever stands on it: the
sandbox itself, the snapshot, its forks. A frozen layer is never written to again, and goes when the
last of them has gone.

Two descriptors keep a layer alive: the launcher's, to stack it again, and the undertaker's, which
is always let go of last, since whoever closes the last one pays for freeing the pages.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sandboxd.launcher.worker import Worker


@dataclass(eq=False, slots=True)
class Layer:
    name: str
    fd: int
    """Its mount. Its tree is in the directory ``rootfs.overlay.UPPER``."""
    users: int = 0
    mergeable: bool = True
    """False once it could not be merged with others (``flattening.py``)."""

    def used_bytes(self) -> int:
        found = os.fstatvfs(self.fd)
        return (found.f_blocks - found.f_bfree) * found.f_frsize


@dataclass(frozen=True, eq=False, slots=True)
class Stack:
    """What a root is made of, below its own upper: layers, highest first, over images."""

    layers: tuple[Layer, ...]
    images: tuple[str, ...]
    """Keys, lowest first: one whose server died is mounted again under the same key."""

    def used_bytes(self) -> int:
        """Of the layers; images are on disk and shared by all."""
        return sum(layer.used_bytes() for layer in self.layers)


@dataclass(eq=False, slots=True)
class Snapshot:
    """A stack under a name. ``meta`` is the daemon's own, given back by ``snapshots``."""

    id: str
    sandbox: str
    """Where it was taken."""
    stack: Stack
    meta: dict[str, Any]


class Layers:
    """Counts who stands on each layer, and sees to it that the undertaker pays."""

    def __init__(self, undertaker: Worker, detach: Callable[[str], None] | None = None) -> None:
        """``detach``: of ``Staging``, where layers are attached."""
        self._undertaker = undertaker
        self._detach = detach

    def new_name(self) -> str:
        """Drawn and not counted: where layers are attached, a sandbox reads its own one's name in
        its mountinfo, and is not to learn how many others there have been."""
        return f"w{secrets.token_hex(6)}"

    def adopt(self, fd: int, name: str | None = None) -> Layer:
        """A layer from a fresh mount, with one user; takes ``fd`` over. ``name``: of one that is
        attached."""
        layer = Layer(name or self.new_name(), fd, users=1)
        self._undertaker.request("hold", (fd,), key=layer.name)
        return layer

    def share(self, layers: Iterable[Layer]) -> None:
        """One more user of each."""
        for layer in layers:
            layer.users += 1

    def release(self, layers: Iterable[Layer]) -> None:
        """One user less of each; those without any are freed, by the undertaker."""
        for layer in layers:
            layer.users -= 1
            if layer.users == 0:
                if self._detach is not None:
                    self._detach(layer.name)
                os.close(layer.fd)
                self._undertaker.request("drop", key=layer.name)
