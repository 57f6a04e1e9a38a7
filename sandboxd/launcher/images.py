"""The images mounted on this node, each shared by all its sandboxes: by a squashfuse each
(``image_server.py``), or by the kernel itself where the node is set up so (``host.images``).

Only squashfuse may hold its FUSE descriptor: a forgotten copy turns its death from ENOTCONN, which
everybody survives, into a hang, which nobody does.

The kernel's images have no server that could die. What can fail is the disk with the file: the same
watch reads from that, past all caches, and ends the sandboxes of an image that it cannot read, or
that is not the file any more that was mounted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from sandboxd.errors import ImageInUse, ImageUnavailable, ImageUnverified, SandboxdError
from sandboxd.launcher import image_server
from sandboxd.launcher.image_server import ServerProgram
from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.worker import Reply
from sandboxd.linux.process import ordinary_priority

MOUNT_TIMEOUT_S: Final = 15.0
CHECK_EVERY_S: Final = 5.0
CHECK_TIMEOUT_S: Final = 10.0
"""A server that has not answered one statfs in this time is killed: its readers cannot be."""

ANSWER_S: Final = 5.0
"""A statfs takes a millisecond, and waits for its turn behind at most one request of each process
that reads."""

KernelMount = Callable[[int, int, str], Task[int]]
"""``HostClient.image``."""


@dataclass(slots=True)
class MountedImage:
    key: str
    name: str
    """Its directory among the mounts: short and without meaning, since sandboxes can see it."""
    ready: Promise[None]
    label: dict[str, str] = field(default_factory=dict)
    """What the daemon calls it; given back to one that starts anew."""
    pid: int = 0
    pidfd: int = -1
    alive_fds: tuple[int, ...] = ()
    """Read ends of two pipes that only the server holds the other ends of; of one that we do, where
    the kernel serves it."""
    held_fds: tuple[int, ...] = ()
    """Where the kernel serves it: the other end, and the SIF."""
    identity: tuple[int, int] = (0, 0)
    """Size and time of change of that SIF, when it was mounted."""
    sandboxes: set[str] = field(default_factory=set)


class Images:
    """The table of mounted images, by key."""

    def __init__(
        self,
        loop: Loop,
        *,
        mounter: Lanes,
        prober: Lanes,
        fuse_fd: Callable[[], Task[int]],
        server: ServerProgram,
        kernel_mount: KernelMount | None,
        on_death: Callable[[MountedImage], None],
    ) -> None:
        """``kernel_mount``: where the kernel serves images."""
        self._loop = loop
        self._mounter = mounter
        self._prober = prober
        self._fuse_fd = fuse_fd
        self._server = server
        self._kernel_mount = kernel_mount
        self._on_death = on_death
        self._next_name = 0
        self._checking: MountedImage | None = None
        self.by_key: dict[str, MountedImage] = {}

    def mount(
        self, key: str, sif_fd: int, offset_bytes: int, label: dict[str, str] | None = None
    ) -> Task[MountedImage]:
        """Mount an image, or wait for who is mounting it already. Takes ``sif_fd`` over.

        Raises ImageUnavailable, ImageUnverified.
        """
        image = self.by_key.get(key)
        if image is not None:
            os.close(sif_fd)
            yield image.ready
            return image
        self._next_name += 1
        image = MountedImage(key, f"i{self._next_name}", Promise(), label or {})
        self.by_key[key] = image
        try:
            if self._kernel_mount is not None:
                yield from self._mount_by_kernel(image, sif_fd, offset_bytes, self._kernel_mount)
            else:
                yield from self._start(image, sif_fd, offset_bytes)
        except (OSError, TimeoutError, ImageUnverified) as error:
            self.by_key.pop(key, None)
            self.kill(image)
            self._mounter.request("unmount", lanes=(image.name,), name=image.name)
            refusal: SandboxdError = (
                error
                if isinstance(error, ImageUnverified)
                else ImageUnavailable(f"the image could not be mounted: {error}")
            )
            image.ready.reject(refusal)
            raise refusal from error
        image.ready.resolve(None)
        return image

    def _start(self, image: MountedImage, sif_fd: int, offset_bytes: int) -> Task[None]:
        fds = [sif_fd]
        try:
            pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
            image.alive_fds = tuple(read for read, _ in pipes)
            fds += [write for _, write in pipes]
            fuse_fd = yield from self._fuse_fd()
            fds.append(fuse_fd)
            reply = self._mounter.request(
                "fuse-mount", (fuse_fd,), lanes=(image.name,), name=image.name
            )
            yield from self._loop.wait(reply, MOUNT_TIMEOUT_S, "mounting the FUSE file system")
            # One pipe on either side of the FUSE fd: whichever way round a kernel closes the
            # descriptors of a dying process (6.18: highest first), one of them ends before it.
            copies = (fds[1], sif_fd, fuse_fd, fds[2])
            image.pid = image_server.spawn(self._server, copies, offset_bytes)
            # What it does is a sandbox's wish: not before the others'.
            ordinary_priority(image.pid)
        finally:
            for fd in fds:
                os.close(fd)
        image.pidfd = os.pidfd_open(image.pid)
        self._loop.add_reader(image.pidfd, lambda: self._died(image))
        yield from self._loop.wait(
            self._check(image), MOUNT_TIMEOUT_S, "the first answer of squashfuse"
        )

    def _mount_by_kernel(
        self, image: MountedImage, sif_fd: int, offset_bytes: int, kernel_mount: KernelMount
    ) -> Task[None]:
        image.held_fds = (sif_fd,)
        digest = image.label.get("digest")
        if not digest:
            raise ImageUnverified(
                "the kernel serves this node's images, and this one has no digest",
                hint="sif-tools convert --store DIR, with DIR as images_dir; or set image_backend",
            )
        try:
            mount_fd = yield from kernel_mount(sif_fd, offset_bytes, digest)
        except OSError as error:
            if error.errno == errno.EPERM:
                raise ImageUnverified(
                    f"the kernel is not given the image: {error.strerror}"
                ) from error
            raise
        try:
            reply = self._mounter.request(
                "attach", (mount_fd,), lanes=(image.name,), name=image.name
            )
            yield from self._loop.wait(reply, MOUNT_TIMEOUT_S, "attaching the image")
        finally:
            os.close(mount_fd)
        status = os.fstat(sif_fd)
        image.identity = (status.st_size, status.st_mtime_ns)
        read, write = os.pipe2(os.O_CLOEXEC)
        image.alive_fds, image.held_fds = (read,), (sif_fd, write)

    def _check(self, image: MountedImage) -> Promise[Reply]:
        """Ask what an image lies on whether it can still be read."""
        lanes = (image.name,)
        if image.held_fds:
            sif_fd = image.held_fds[0]
            return self._prober.request("file-check", (sif_fd,), lanes=lanes, was=image.identity)
        return self._prober.request("fuse-check", lanes=lanes, name=image.name)

    def mounted(self, key: str) -> MountedImage:
        """An image that files can be read from. Raises ImageUnavailable."""
        image = self.by_key.get(key)
        if image is None or not image.ready.settled or image.ready.error:
            raise ImageUnavailable("the image is not mounted")
        return image

    def are_mounted(self, names: Iterable[str]) -> bool:
        """Whether these, by their names among the mounts, are what is mounted now."""
        return {image.name for image in self.by_key.values()}.issuperset(names)

    def unmount(self, key: str) -> str | None:
        """Unmount an image that no sandbox uses; returns what its name was among the mounts.

        Raises ImageInUse.
        """
        image = self.by_key.get(key)
        if image is None:
            return None
        if image.sandboxes or not image.ready.settled:
            raise ImageInUse(f"{len(image.sandboxes)} sandboxes use the image")
        del self.by_key[key]
        # First the mount, then the server: a server that goes first leaves a mount of errors.
        done = self._mounter.request("unmount", lanes=(image.name,), name=image.name)
        done.watch(lambda: self.kill(image))
        return image.name

    def kill(self, image: MountedImage) -> None:
        """Give an image up, with those that use it. ``_died`` hears of a server's end."""
        if not image.pid:
            self._gone(image)
            return
        with suppress(ProcessLookupError):
            os.kill(image.pid, signal.SIGKILL)

    def watch_servers(self) -> Task[None]:
        """For ever: ask each server in turn for a statfs, and kill one that does not answer."""
        while True:
            yield from self._loop.sleep(CHECK_EVERY_S)
            for image in list(self.by_key.values()):
                if not image.ready.settled or image.key not in self.by_key:
                    continue
                try:
                    yield from self._loop.wait(self._check(image), CHECK_TIMEOUT_S, "a check")
                except TimeoutError:
                    print(f"image {image.name}: does not answer; given up", file=sys.stderr)
                    self.kill(image)
                except OSError as error:
                    if not image.pid:  # of a server that died its pidfd tells
                        print(f"image {image.name}: {error}; given up", file=sys.stderr)
                        self.kill(image)

    def answer(self, keys: Iterable[str]) -> Task[bool]:
        """Whether the servers of these images answer now. One that does not is left to the watch,
        which gives it longer before it kills it."""
        asked = []
        for key in keys:
            image = self.by_key.get(key)
            if image is None:
                return False
            asked.append(self._check(image))
        deadline = time.monotonic() + ANSWER_S
        for reply in asked:
            try:
                yield from self._loop.wait(reply, max(0.0, deadline - time.monotonic()), "a check")
            except (OSError, TimeoutError):
                return False
        return True

    def suspect(self, image: MountedImage) -> Task[None]:
        """Something that needed this image took too long: kill its server unless it answers now."""
        try:
            yield from self._loop.wait(self._check(image), CHECK_TIMEOUT_S, "a check")
        except (OSError, TimeoutError):
            self.kill(image)

    def _died(self, image: MountedImage) -> None:
        self._loop.remove_reader(image.pidfd)
        os.close(image.pidfd)
        image.pidfd = -1
        with suppress(ChildProcessError):
            os.waitpid(image.pid, 0)
        self._gone(image)

    def _gone(self, image: MountedImage) -> None:
        for fd in (*image.held_fds, *image.alive_fds):
            os.close(fd)
        image.held_fds = image.alive_fds = ()
        if self.by_key.get(image.key) is image:
            del self.by_key[image.key]
            self._mounter.request("unmount", lanes=(image.name,), name=image.name)
            self._on_death(image)
