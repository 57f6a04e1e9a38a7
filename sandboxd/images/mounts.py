"""Which images are mounted, who uses them, and when one may go.

One mount serves every sandbox of an image. It is made once however many ask at the same time, stays
for ``idle_s`` after its last user has gone, and when its server dies it is made again for whoever
comes next; those who had the dead one hold a reference to nothing, and letting go of it does no
harm.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sandboxd.errors import ImageInUse, ImageUnavailable, SandboxdError
from sandboxd.images.copies import Copies
from sandboxd.images.leases import Leases
from sandboxd.images.store import CheckedImage, ImageStore

log = logging.getLogger(__name__)


class Mounter(Protocol):
    """What can mount: the launcher's client."""

    async def mount(
        self, key: str, name: str, sif_offset: int, sif_fd: int, digest: str = ""
    ) -> None: ...

    async def unmount(self, key: str) -> bool:
        """False when the launcher still has a user of it."""


@dataclass(eq=False, slots=True)
class Mount:
    """One SIF's mount. ``users`` are sandboxes and creates under way."""

    key: str
    name: str
    ready: asyncio.Future[None]
    users: int = 0
    idle_since: float = 0.0
    leaving: bool = False

    @property
    def is_ready(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and not self.ready.exception()


@dataclass(frozen=True, slots=True)
class Share:
    """One user's part in all the mounts of an image, base first."""

    mounts: tuple[Mount, ...]

    @property
    def keys(self) -> list[str]:
        """For the launcher: lowest layer first."""
        return [mount.key for mount in self.mounts]


class ImageMounts:
    """The mounts of one launcher. Needs a running event loop."""

    def __init__(
        self,
        store: ImageStore,
        mounter: Mounter,
        *,
        idle_s: float,
        copies_dir: str = "",
        copies_bytes: int = 0,
        read_ahead_bytes: int = 0,
    ) -> None:
        """``copies_dir`` and ``copies_bytes``: see ``copies.py``. ``read_ahead_bytes``: a SIF of at
        most so many is read into memory once it is mounted."""
        self.store = store
        self.copies = Copies(
            copies_dir,
            copies_bytes,
            open_source=store.open_now,
            is_mounted=lambda key: key in self._mounts,
        )
        self._read_ahead_bytes = read_ahead_bytes
        self._mounter = mounter
        self.idle_s = idle_s
        self._leases = Leases(store.directory)
        self._mounts: dict[str, Mount] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.acquired: Counter[str] = Counter(hit=0, miss=0)
        """How often whoever wanted an image found it mounted, and how often it had to wait."""

    def mounted(self) -> list[Mount]:
        """The mounts that files can be read from."""
        return [mount for mount in self._mounts.values() if mount.is_ready]

    def is_local(self, name: str) -> bool:
        """Whether all of an image is known to be copied to this node."""
        image = self.store.remembered(name)
        return image is not None and self.copies.has(image)

    async def acquire(
        self, name: str, keys: Sequence[str] | None = None
    ) -> tuple[CheckedImage, Share]:
        """The image and a share of its mounts, to be given back with ``release``.

        ``keys``: which files exactly, for what stands on them already.

        Raises ImageNotFound, ImageInvalid, ImageUnavailable, NodeUnavailable.
        """
        image = await self.store.check(name)
        parts = (*image.below, image)
        wanted: Sequence[str | None] = [None] * len(parts) if keys is None else keys
        if len(wanted) != len(parts):
            raise _another_file(name)
        if len(parts) == 1:
            return image, Share((await self._acquire(image, wanted[0]),))
        # At once: each may have to be mounted, and none needs another for that.
        given = await asyncio.gather(*map(self._acquire, parts, wanted), return_exceptions=True)
        mounts = [one for one in given if isinstance(one, Mount)]
        failure = next((one for one in given if isinstance(one, BaseException)), None)
        if failure is not None:
            self.release(Share(tuple(mounts)))
            raise failure
        return image, Share(tuple(mounts))

    async def _acquire(self, original: CheckedImage, key: str | None = None) -> Mount:
        image = original if key == original.key else self.copies.nearest(original)
        if key not in (None, image.key):
            raise _another_file(original.name)
        while True:
            mount = self._mounts.get(image.key)
            if mount is None:
                mount = self._begin(image, original)
            elif mount.leaving:
                # Taken out at this moment: wait until it is, then mount it anew.
                await asyncio.wait({mount.ready})
                continue
            break
        self._leases.want(image.key, image.digest)
        mount.name = image.name
        mount.users += 1
        self.acquired["hit" if mount.is_ready else "miss"] += 1
        try:
            if not mount.is_ready:
                await asyncio.shield(mount.ready)
        except BaseException:
            self._release(mount)
            raise
        return mount

    def release(self, share: Share) -> None:
        """Give a share back. The mounts themselves stay for a while."""
        for mount in share.mounts:
            self._release(mount)

    @staticmethod
    def _release(mount: Mount) -> None:
        mount.users -= 1
        mount.idle_since = asyncio.get_running_loop().time()

    def hold(self, keys: Sequence[str], name: str) -> Share:
        """A share for a sandbox that was there before this daemon."""
        return Share(tuple(self._hold(key, name) for key in keys))

    def _hold(self, key: str, name: str) -> Mount:
        mount = self._mounts.get(key)
        if mount is None:
            # Its server is dead already; there is something to let go of all the same.
            mount = self._known(key, name)
        mount.name = name
        mount.users += 1
        return mount

    def died(self, key: str) -> None:
        """Its server is gone: the next one who asks gets a new one."""
        self._mounts.pop(key, None)

    def mounted_for_another(self, key: str, name: str, digest: str) -> None:
        """It was mounted for a daemon that is gone: known, so that it is unmounted when idle."""
        if key not in self._mounts:
            self._mounts[key] = self._known(key, name)
            self._leases.want(key, digest)

    def forget(self, share: Share) -> None:
        """As ``died``, for whoever found these very mounts unusable before anybody was told. One
        of them that is well is found mounted by the launcher, and stays."""
        for mount in share.mounts:
            if self._mounts.get(mount.key) is mount:
                del self._mounts[mount.key]

    def reset(self, rows: list[dict[str, Any]]) -> None:
        """Take over what the launcher says is mounted (its answer to ``images``)."""
        listed = {str(row["key"]): row for row in rows}
        for key, mount in list(self._mounts.items()):
            if key not in listed and mount.ready.done():
                del self._mounts[key]
        for key, row in listed.items():
            if key not in self._mounts:
                self._mounts[key] = self._known(key, str(row.get("name", "")))
            self._leases.want(key, str(row.get("digest", "")))

    def _known(self, key: str, name: str) -> Mount:
        loop = asyncio.get_running_loop()
        mount = Mount(key, name, loop.create_future(), idle_since=loop.time())
        mount.ready.set_result(None)
        return mount

    def _begin(self, image: CheckedImage, original: CheckedImage) -> Mount:
        mount = Mount(image.key, image.name, asyncio.get_running_loop().create_future())
        self._mounts[image.key] = mount
        self._spawn(self._mount(image, original, mount))
        return mount

    async def _mount(self, image: CheckedImage, original: CheckedImage, mount: Mount) -> None:
        # A task of its own: the mount is shared, and must not fail with whoever asked first.
        try:
            fd = await self._open(image, original)
            try:
                await self._mounter.mount(image.key, image.name, image.sif_offset, fd, image.digest)
                if os.fstat(fd).st_size <= self._read_ahead_bytes:
                    self._spawn(asyncio.to_thread(_read_ahead, os.dup(fd)))
            finally:
                os.close(fd)
        except BaseException as error:
            if self._mounts.get(image.key) is mount:
                del self._mounts[image.key]
            if isinstance(error, Exception):
                mount.ready.set_exception(error)
                mount.ready.exception()  # heard, even if nobody waits any more
            else:
                mount.ready.cancel()
                raise
        else:
            mount.idle_since = asyncio.get_running_loop().time()
            mount.ready.set_result(None)

    async def _open(self, image: CheckedImage, original: CheckedImage) -> int:
        try:
            return await self.store.open(image)
        except ImageUnavailable:
            if image.key == original.key:
                raise
            # The copy of it here is not what it was; the key says no more than which mount it is.
            self.copies.forget(image)
            return await self.store.open(original)

    def evict_idle(self) -> None:
        """Unmount what has had no user for ``idle_s``, the longest idle first."""
        self._leases.keep_alive()
        now = asyncio.get_running_loop().time()
        idle = [
            mount
            for mount in self._mounts.values()
            if not mount.users
            and not mount.leaving
            and mount.is_ready
            and now - mount.idle_since >= self.idle_s
        ]
        for mount in sorted(idle, key=lambda one: one.idle_since):
            self._begin_unmount(mount)

    async def evict(self, name: str) -> bool:
        """Unmount every mount of this name now; False when there is none. Its file stays.

        Raises ImageInUse while it has a sandbox, or one is being made of it.
        """
        mounts = [mount for mount in self._mounts.values() if mount.name == name]
        users = sum(mount.users for mount in mounts)
        if users:
            raise ImageInUse(f"image {name!r} has {users} sandboxes", users=users)
        for mount in mounts:
            if mount.is_ready and not mount.leaving:
                self._begin_unmount(mount)
        if mounts:
            await asyncio.wait({mount.ready for mount in mounts})
        if any(self._mounts.get(mount.key) is mount for mount in mounts):
            raise ImageInUse(f"image {name!r} is in use")
        return bool(mounts)

    def _begin_unmount(self, mount: Mount) -> None:
        mount.leaving = True
        mount.ready = asyncio.get_running_loop().create_future()
        self._spawn(self._unmount(mount))

    async def _unmount(self, mount: Mount) -> None:
        gone = False
        try:
            gone = await self._mounter.unmount(mount.key)
        except SandboxdError as error:
            log.warning("image %s cannot be unmounted: %s", mount.name, error.message)
        finally:
            mount.leaving = False
            mount.idle_since = asyncio.get_running_loop().time()
            if gone and self._mounts.get(mount.key) is mount:
                del self._mounts[mount.key]
                self._leases.unwant(mount.key)
            mount.ready.set_result(None)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is under way; mounts stay, as they are the launcher's."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.copies.close()
        await self._leases.close()


def _another_file(name: str) -> ImageUnavailable:
    return ImageUnavailable(f"image {name!r} is another file by now")


def _read_ahead(fd: int) -> None:
    """Have a file read into memory, as far as there is room. Takes ``fd`` over."""
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    except OSError as error:  # a file system that cannot
        log.info("an image is not read ahead: %s", error)
    finally:
        os.close(fd)
