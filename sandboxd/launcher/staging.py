"""Roots on kernels that need more than descriptors: layers attached, or made by the host.

Linux 6.6 and newer mostly need none of this: there the mounter makes tmpfs and overlay in one go,
attached nowhere. Elsewhere a layer lies beside the images, in the launcher's mount namespace, from
when it is made until its last user lets go of it, since an overlay takes only what is attached
there; sandboxes never see that namespace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.layers import Layer
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.worker import Reply
from sandboxd.linux import mount


class MakeLayer(Protocol):
    """Makes a writable layer of so many bytes and inodes; its detached mount's descriptor."""

    def __call__(self, size_bytes: int, inodes: int) -> Task[int]: ...


class Staging:
    """Makes and attaches layers. One for a launcher that needs it."""

    def __init__(self, loop: Loop, *, mounter: Lanes, images_dir: str, make: MakeLayer) -> None:
        self._loop = loop
        self._mounter = mounter
        self._images_dir = images_dir
        self.make = make
        self.attached: set[str] = set()
        """By name; what else lies beside the images is lost (``sweep``)."""

    def attach(self, fd: int, name: str) -> None:
        """Attach a detached layer under ``name``; its descriptor stays good. Raises OSError."""
        path = f"{self._images_dir}/{name}"
        os.mkdir(path, 0o700)
        try:
            mount.move_mount(fd, "", mount.AT_FDCWD, path, mount.MOVE_MOUNT_F_EMPTY_PATH)
        except OSError:
            os.rmdir(path)
            raise
        self.attached.add(name)

    def detach(self, name: str) -> None:
        """Undo ``attach``. Frees nothing as long as there are descriptors of the layer."""
        self.attached.discard(name)
        path = f"{self._images_dir}/{name}"
        with suppress(OSError):
            mount.umount2(path, mount.MNT_DETACH)
        with suppress(OSError):
            os.rmdir(path)

    def ask(
        self,
        name: str,
        layers: Sequence[Layer],
        lowers: Sequence[str],
        size_bytes: int,
        inodes: int,
        *,
        resolv: str | None = None,
    ) -> Promise[Reply]:
        """A root whose upper is a new layer ``name``: as the mounter's ``root``, and the layer is
        attached when it is answered."""

        def discard(reply: Reply) -> None:
            reply.close()
            self.detach(name)

        answer: Promise[Reply] = Promise(discard)

        def steps() -> Task[None]:
            try:
                reply = yield from self._make(
                    name, layers, lowers, size_bytes, inodes, resolv=resolv
                )
            except (OSError, TimeoutError) as error:
                answer.reject(error)
            else:
                answer.resolve(reply)

        self._loop.spawn(steps())
        return answer

    def _make(
        self,
        name: str,
        layers: Sequence[Layer],
        lowers: Sequence[str],
        size_bytes: int,
        inodes: int,
        *,
        resolv: str | None,
    ) -> Task[Reply]:
        undo: list[Callable[[], None]] = []
        # The names, now: who stands on a layer keeps it until this is answered.
        below = [layer.name for layer in layers]
        try:
            fd = yield from self.make(size_bytes, inodes)
            undo.append(lambda: os.close(fd))
            self.attach(fd, name)
            undo.append(lambda: self.detach(name))
            reply = yield self._mounter.request(
                "attached-root",
                lanes=tuple(lowers),
                lowers=list(lowers),
                layer=name,
                layers=below,
                resolv=resolv,
            )
        except BaseException:
            for step in reversed(undo):
                step()
            raise
        return Reply({"layer": name}, [*reply.fds, fd])
