"""Tell a shared store which SIFs this node reads, so that ``sif-tools gc`` leaves them alone.

A store that this node cannot write is read without: then only the grace time of the collection
stands between a sandbox and the removal of its image, and the node says so once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from sif_tools.errors import NotAStore
from sif_tools.store.layout import is_store, open_store
from sif_tools.store.leases import TOUCH_EVERY_S, LeaseHolder

log = logging.getLogger(__name__)


class Leases:
    """The leases of one daemon. Every method returns at once; a thread does the work."""

    def __init__(self, images_dir: Path) -> None:
        self._dir = images_dir
        self._wanted: dict[str, str] = {}
        """The mount's key, by which it is let go of, and the digest."""
        self._held: set[str] = set()
        self._holder: LeaseHolder | None = None
        self._touched_at = 0.0
        self._working: asyncio.Task[None] | None = None
        self._refused = False

    def want(self, key: str, digest: str) -> None:
        """Lease a SIF, from soon on, until ``unwant``."""
        if digest and self._wanted.get(key) != digest:
            self._wanted[key] = digest
            self._begin()

    def unwant(self, key: str) -> None:
        if self._wanted.pop(key, None) is not None:
            self._begin()

    def keep_alive(self) -> None:
        """To be called now and then; touches the leases when it is time."""
        if self._wanted and time.monotonic() - self._touched_at > TOUCH_EVERY_S:
            self._begin()

    def _begin(self) -> None:
        if self._working is None or self._working.done():
            self._working = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while True:
            wanted = set(self._wanted.values())
            await asyncio.to_thread(self._settle, wanted)
            if wanted == set(self._wanted.values()):
                return

    def _settle(self, wanted: set[str]) -> None:
        try:
            if self._holder is None:
                if not is_store(self._dir):
                    return
                self._holder = LeaseHolder(open_store(self._dir))
            for digest in wanted - self._held:
                self._holder.take(digest)
            for digest in self._held - wanted:
                self._holder.drop(digest)
            self._held = wanted
            if wanted:
                self._holder.touch()
            self._touched_at = time.monotonic()
        except (OSError, NotAStore) as error:
            if not self._refused:
                self._refused = True
                log.warning("images are read without a lease on them: %s", error)
            # Tried again when it would be touched.
            self._touched_at = time.monotonic()

    async def close(self) -> None:
        """Give all back, but for what sandboxes still use: their mounts outlive this daemon, and
        the leases a while."""
        if self._working is not None:
            await asyncio.gather(self._working, return_exceptions=True)
