"""Copies of hot images on this node's own disk, where the store is a slow one that all nodes share.

An image that is asked for again is copied behind the requests: the whole file, whose SHA-256 must
be the digest that the store has it by, under a name of its own and then by a link. From then on it
is mounted from there; a mount that is there already goes on with the file it has. The copies take
so many bytes at most: for another one those go that are not mounted, the longest unused first, and
where that is not enough it is not made. A copy that is gone or was changed is forgotten, and the
store's own file mounted instead.

They outlive the daemon. What a crash left half made is removed by the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sandboxd.errors import ImageUnavailable
from sandboxd.images.checked import CheckedImage, file_key
from sif_tools.errors import SifError
from sif_tools.store.files import TEMPORARY, publish_file

log = logging.getLogger(__name__)

HOT_USES: Final = 2
"""Who asks for an image once may never do so again."""
PAUSE_S: Final = 60.0
"""After a copy that failed: of a full disk, or a store that does not answer."""
USES_MAX: Final = 65_536
SUFFIX: Final = ".sif"


@dataclass(slots=True)
class Copy:
    path: str
    key: str
    size_bytes: int
    used_at: float
    """Seconds since the epoch."""


class Copies:
    """The copies of one daemon. Its methods return at once; a thread does the work.

    ``open_source`` opens an image of the store, blocking. ``is_mounted`` tells whether a file is in
    use, by its key.
    """

    def __init__(
        self,
        directory: str,
        budget_bytes: int,
        *,
        open_source: Callable[[CheckedImage], int],
        is_mounted: Callable[[str], bool],
    ) -> None:
        self.budget_bytes = budget_bytes
        self._dir = Path(directory)
        self._open_source = open_source
        self._is_mounted = is_mounted
        self._copies: dict[str, Copy] = {}
        self._uses: dict[str, int] = {}
        self._waiting: dict[str, CheckedImage] = {}
        self._working: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self.made = self.evicted = self.failed = 0
        if budget_bytes:
            self._find()

    @property
    def bytes(self) -> int:
        """What they take on the disk."""
        return sum(copy.size_bytes for copy in self._copies.values())

    @property
    def count(self) -> int:
        return len(self._copies)

    def has(self, image: CheckedImage) -> bool:
        """Whether all of it is here."""
        return all(part.digest in self._copies for part in (*image.below, image))

    def nearest(self, image: CheckedImage) -> CheckedImage:
        """One SIF of an image, as a file here if there is one. Counts as a use of it."""
        if not self.budget_bytes or not image.digest:
            return image
        copy = self._copies.get(image.digest)
        if copy is not None:
            copy.used_at = time.time()
            return replace(image, key=copy.key, path=copy.path, below=())
        self._count(image)
        return image

    def forget(self, image: CheckedImage) -> None:
        """What ``nearest`` gave cannot be used."""
        copy = self._copies.get(image.digest)
        if copy is not None and copy.path == image.path:
            del self._copies[image.digest]
            with suppress(OSError):
                os.unlink(copy.path)

    def _count(self, image: CheckedImage) -> None:
        uses = self._uses.pop(image.digest, 0) + 1
        self._uses[image.digest] = uses
        while len(self._uses) > USES_MAX:
            del self._uses[next(iter(self._uses))]
        if uses < HOT_USES or image.digest in self._waiting or time.monotonic() < self._not_before:
            return
        self._waiting[image.digest] = image
        if self._working is None or self._working.done():
            self._working = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        """One at a time: a copy takes the store's bandwidth from those who create."""
        while self._waiting:
            digest, image = next(iter(self._waiting.items()))
            try:
                await self._copy(image)
            except (OSError, SifError, ImageUnavailable) as error:
                self.failed += 1
                self._not_before = time.monotonic() + PAUSE_S
                self._waiting.clear()
                log.warning("image %s is not copied to this node: %s", image.name, error)
            finally:
                self._waiting.pop(digest, None)

    async def _copy(self, image: CheckedImage) -> None:
        source = await asyncio.to_thread(self._open_source, image)
        size_bytes = os.fstat(source).st_size
        try:
            room = self._make_room(size_bytes)
        except OSError:
            os.close(source)
            raise
        if not room:
            os.close(source)
            self._uses.pop(image.digest, None)  # it may try again when it is as hot again
            return
        path = self._dir / f"{image.digest}{SUFFIX}"
        await asyncio.to_thread(_publish, source, size_bytes, image.digest, path)
        status = path.stat()
        self._copies[image.digest] = Copy(str(path), file_key(status), size_bytes, time.time())
        self._uses.pop(image.digest, None)
        self.made += 1

    def _make_room(self, size_bytes: int) -> bool:
        over = self.bytes + size_bytes - self.budget_bytes
        going = []
        for digest, copy in sorted(self._copies.items(), key=lambda item: item[1].used_at):
            if over <= 0:
                break
            # One that is mounted would keep its bytes although its name is gone.
            if not self._is_mounted(copy.key):
                going.append(digest)
                over -= copy.size_bytes
        if over > 0:
            return False
        for digest in going:
            with suppress(FileNotFoundError):
                os.unlink(self._copies[digest].path)
            del self._copies[digest]
            self.evicted += 1
        return True

    def _find(self) -> None:
        """Those of a daemon before this one; verified when they were made. A directory in which
        nothing can be read or removed costs the copies and no more."""
        try:
            self._take_over()
        except OSError as error:
            log.warning("no images are copied to this node: %s", error)
            self._copies.clear()
            self.budget_bytes = 0

    def _take_over(self) -> None:
        for entry in list(os.scandir(self._dir)):
            digest = entry.name.removesuffix(SUFFIX)
            status = entry.stat(follow_symlinks=False)
            if entry.name.endswith(TEMPORARY):
                os.unlink(entry.path)
            elif entry.name.endswith(SUFFIX) and len(digest) == 64:
                self._copies[digest] = Copy(
                    entry.path, file_key(status), status.st_size, status.st_mtime
                )
        if self.bytes > self.budget_bytes:
            self._make_room(0)

    async def close(self) -> None:
        """End what is under way."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)


def _publish(source: int, size_bytes: int, digest: str, path: Path) -> None:
    """Takes ``source`` over: whoever asked for it may have given up meanwhile."""
    try:
        publish_file(source, size_bytes, digest, path)
    finally:
        os.close(source)
