"""Reset, snapshot, rollback and fork, as the API asks for them.

The layers are the launcher's; here is the record of each snapshot (whose it is, of which image, how
long it lives), which the launcher gives back to a daemon that starts anew.
"""

from __future__ import annotations

import base64
import logging
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from sandboxd.errors import (
    ImageUnavailable,
    NodeUnavailable,
    SandboxdError,
    SandboxNotFound,
    SandboxPaused,
    SandboxReset,
    SnapshotNotFound,
)
from sandboxd.images.mounts import Share
from sandboxd.model import ImageConfig, MountSpec, SandboxState
from sandboxd.runtime.failures import NODE_LOST, death
from sandboxd.runtime.sandbox import Sandbox, SandboxView, now

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

log = logging.getLogger(__name__)

OnRunning = Literal["fail", "kill", "copy"]

META_VERSION: Final = 1


@dataclass(eq=False, slots=True)
class SnapshotRecord:
    id: str
    sandbox: str
    """Where it was taken; that one may be gone."""
    run: str
    name: str
    image: str
    image_key: str
    image_config: ImageConfig
    created_at: float
    expires_at: float
    bytes: int = 0
    """Of all its layers, at the time it was taken."""
    mounts: tuple[MountSpec, ...] = ()
    """Of the sandbox that it was taken of."""
    share: Share | None = None
    """So that the image is not unmounted under it."""

    def meta(self) -> dict[str, Any]:
        return {
            "version": META_VERSION,
            "run": self.run,
            "name": self.name,
            "image": self.image,
            "image_key": self.image_key,
            "image_config": asdict(self.image_config),
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "mounts": [one.as_dict() for one in self.mounts],
        }


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot, how it was had, and for how many milliseconds processes were frozen for it."""

    record: SnapshotRecord
    how: Literal["frozen", "killed", "copied"]
    frozen_ms: float | None


class SnapshotTable:
    """The snapshots of this node."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._table: dict[str, SnapshotRecord] = {}

    def __iter__(self) -> Any:
        return iter([self._table[key] for key in sorted(self._table)])

    def find(self, snapshot_id: str) -> SnapshotRecord:
        record = self._table.get(snapshot_id)
        if record is None:
            raise SnapshotNotFound(f"no snapshot {snapshot_id!r} on this node")
        return record

    async def take(
        self, sandbox: Sandbox, *, name: str, on_running: OnRunning, ttl_s: float
    ) -> Taken:
        """Freeze what the sandbox has written. It goes on with a fresh layer on top.

        Raises SandboxRunning, SandboxBusy, SandboxPaused, DiskFull, SnapshotTooDeep, those of a
        sandbox that is gone.
        """
        _check_running(sandbox)
        record = SnapshotRecord(
            id="sn-" + base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower(),
            sandbox=sandbox.id,
            run=sandbox.spec.run,
            name=name,
            image=sandbox.spec.image,
            image_key=sandbox.image_key,
            image_config=sandbox.image_config,
            created_at=now(),
            expires_at=now() + ttl_s,
            mounts=sandbox.spec.mounts or (),
        )
        answer = await self._runtime.launcher.call(
            "snapshot",
            sandbox=sandbox.id,
            snapshot=record.id,
            on_running=on_running,
            meta=record.meta(),
        )
        record.bytes = int(answer.ok.get("bytes") or 0)
        assert sandbox.mount is not None
        self._add(record, sandbox.mount.keys)
        sandbox.events.add("snapshot", f"taken as {record.id}", snapshot=record.id)
        return Taken(record, answer.ok["how"], answer.ok.get("frozen_ms"))

    async def delete(self, snapshot_id: str) -> None:
        """Let go of it; what was made from it lives on. One that does not exist is deleted."""
        if snapshot_id not in self._table:
            return
        await self._runtime.launcher.call("snapshot-delete", snapshot=snapshot_id)
        record = self._table.pop(snapshot_id, None)
        if record is not None:
            self._let_go(record)

    async def delete_expired(self) -> None:
        """Those whose time is up; what fails is tried again at the next call."""
        for record in [one for one in self if one.expires_at <= now()]:
            try:
                await self.delete(record.id)
            except SandboxdError as error:
                log.warning(
                    "snapshot %s cannot be deleted yet: %s",
                    record.id,
                    error.message,
                    extra={"snapshot": record.id},
                )

    def adopt(self, rows: list[dict[str, Any]]) -> None:
        """Take over what the launcher has; what it has not is gone."""
        found = {str(row["snapshot"]): row for row in rows}
        for key in self._table.keys() - found.keys():
            self._let_go(self._table.pop(key))
        for key in found.keys() - self._table.keys():
            meta = dict(found[key]["meta"])
            if meta.pop("version", None) != META_VERSION:
                log.warning("snapshot %s has no record of this version", key)
                continue
            config = meta.pop("image_config")
            mounts = tuple(MountSpec(**one) for one in meta.pop("mounts", ()))
            self._add(
                SnapshotRecord(
                    id=key,
                    sandbox=str(found[key]["sandbox"]),
                    bytes=int(found[key]["bytes"]),
                    image_config=ImageConfig(**{**config, "env": tuple(config["env"])}),
                    mounts=mounts,
                    **meta,
                ),
                [str(image) for image in found[key]["images"]],
            )

    def _add(self, record: SnapshotRecord, image_keys: list[str]) -> None:
        record.share = self._runtime.images.hold(image_keys, record.image)
        self._table[record.id] = record

    def _let_go(self, record: SnapshotRecord) -> None:
        if record.share is not None:
            self._runtime.images.release(record.share)
            record.share = None


async def reset(
    runtime: Runtime, sandbox: Sandbox, snapshot: SnapshotRecord | None
) -> tuple[SandboxView, dict[str, float]]:
    """Begin anew from the image, or from a snapshot: same id, limits and time of life.

    Everything that runs in it ends first, with SandboxReset for whoever waits. Returns the
    milliseconds by phase too. Raises SandboxBusy, SandboxPaused, ImageUnavailable, NodeError, those
    of a sandbox that is gone.
    """
    _check_running(sandbox)
    share: Share | None = None
    if snapshot is not None:
        share = await acquire(runtime, snapshot)
    try:
        sandbox.begin_reset(SandboxReset(f"sandbox {sandbox.id} was reset"))
        runtime.sessions.forget(sandbox.id)
        runtime.processes.forget(sandbox.id)
        try:
            answer = await runtime.launcher.call(
                "reset", sandbox=sandbox.id, snapshot=snapshot.id if snapshot else None
            )
        except (NodeUnavailable, SandboxNotFound):
            # The launcher died with the sandbox in its hands: that will be no better next time.
            sandbox.fail(death(NODE_LOST))
            assert sandbox.failure is not None
            raise sandbox.failure.with_traceback(None) from None
        except SandboxdError as error:
            sandbox.fail(error)
            raise
        if share is not None:
            # It stands on these now.
            sandbox.mount, share = share, sandbox.mount
        runtime.connect(sandbox, answer)
    finally:
        if share is not None:
            runtime.images.release(share)
    what = f"to snapshot {snapshot.id}" if snapshot else "to its image"
    sandbox.events.add("reset", what)
    return sandbox.view(), dict(answer.ok.get("phases") or {})


async def acquire(runtime: Runtime, snapshot: SnapshotRecord) -> Share:
    """A share of the mounts that a snapshot stands on. Raises ImageUnavailable."""
    keys = None if snapshot.share is None else snapshot.share.keys
    image, share = await runtime.images.acquire(snapshot.image, keys)
    if image.key != snapshot.image_key:
        runtime.images.release(share)
        raise ImageUnavailable(f"image {snapshot.image!r} is another file since the snapshot")
    return share


def _check_running(sandbox: Sandbox) -> None:
    sandbox.control()
    if sandbox.state is SandboxState.PAUSED:
        raise SandboxPaused(f"sandbox {sandbox.id} is paused", hint="resume it first")
