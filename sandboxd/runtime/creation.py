"""How a sandbox comes to be: from a specification to one that runs, or to nothing of it.

In the order of a plain create::

    admission -> image mounted -> launcher's create -> connected -> its files written

Whatever fails on the way takes back what was done before it, and tells why.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from sandboxd.errors import ImageUnavailable, RequestError, SandboxdError, SandboxNotFound
from sandboxd.launcher.client import CALL_TIMEOUT_S, Answer
from sandboxd.launcher.protocol import META_MAX, encode
from sandboxd.model import CopyFrom, InlineFile, SandboxSpec, SandboxState
from sandboxd.runtime.clock import ms_since
from sandboxd.runtime.files import FileWrite
from sandboxd.runtime.ids import new_id
from sandboxd.runtime.mounts import mounts_request, with_ids
from sandboxd.runtime.network import network_request
from sandboxd.runtime.sandbox import IdempotencyMark, Sandbox, SandboxView, now
from sandboxd.runtime.snapshots import SnapshotRecord, acquire

if TYPE_CHECKING:
    from sandboxd.runtime.manager import Runtime

COPY_TIMEOUT_S: Final = 180.0
"""For a create with another sandbox's files: more than the launcher gives the copy."""

IMAGE_AGAIN_S: Final = (0.02, 0.2)
"""Pauses before an image whose server has just died is mounted again for a create."""


class GiveUp(Protocol):
    """Forget a sandbox whose create failed; ``asked``: the launcher may have made it."""

    def __call__(self, sandbox: Sandbox, *, asked: bool) -> None: ...


@dataclass(slots=True)
class Creation:
    """What makes a runtime's sandboxes, and puts them into its table."""

    runtime: Runtime
    table: dict[str, Sandbox]
    give_up: GiveUp

    async def create(
        self,
        spec: SandboxSpec,
        mark: IdempotencyMark | None,
        files: Sequence[InlineFile],
        program: bytes,
        *,
        wait_s: float,
    ) -> SandboxView:
        """Raises as ``Runtime.create``; then nothing of it is in the table."""
        runtime = self.runtime
        began_at = time.monotonic()
        snapshot = None
        if spec.snapshot is not None:
            snapshot = runtime.snapshots.find(spec.snapshot)
            inherited = snapshot.mounts if spec.mounts is None else spec.mounts
            spec = replace(spec, image=snapshot.image, mounts=inherited)
        if spec.copy_from is not None:
            spec = replace(spec, image=self._image_to_copy(spec, spec.copy_from))
        sandbox = Sandbox(id=new_id(), spec=spec, created_at=now(), mark=mark, finished=not files)
        sandbox.program = program
        sandbox.observe(runtime.meters, runtime.node_events)
        await runtime.admission.enter(sandbox.id, spec, wait_s)
        sandbox.created_at = now()
        self.table[sandbox.id] = sandbox
        started_at = time.monotonic()
        if wait_s:
            sandbox.phases_ms["waiting"] = round((started_at - began_at) * 1000, 3)
        try:
            answer = await self._launch(sandbox, snapshot)
            sandbox.phases_ms |= _phases(answer.ok)
            runtime.connect(sandbox, answer)
            if sandbox.spec.mounts:
                sandbox.spec = spec = with_ids(sandbox.spec, answer.ok.get("mapped") or ())
                if not files:
                    await runtime.launcher.call("note", sandbox=sandbox.id, meta=sandbox.meta())
            if files:
                put_at = time.monotonic()
                for file in files:
                    await _put(sandbox, file)
                sandbox.finished = True
                await runtime.launcher.call("note", sandbox=sandbox.id, meta=sandbox.meta())
                sandbox.phases_ms["files"] = ms_since(put_at)
        except BaseException as error:
            if isinstance(error, SandboxdError):
                told = {"code": error.code, "cause": error.cause}
                sandbox.events.add("create-failed", error.message, **told)
            self.give_up(sandbox, asked="image" in sandbox.phases_ms)
            raise
        finally:
            sandbox.made.set()
        sandbox.phases_ms["total"] = ms_since(started_at)
        runtime.meters.created(sandbox.phases_ms)
        sandbox.events.add("created", f"of image {spec.image}", image_key=sandbox.image_key)
        if spec.copy_from is not None:
            copied = dict(answer.ok.get("copied") or {})
            sandbox.events.add("copied", f"from sandbox {spec.copy_from.sandbox}", **copied)
        runtime.watch_expiry(sandbox)
        return sandbox.view()

    def _image_to_copy(self, spec: SandboxSpec, copy_from: CopyFrom) -> str:
        """That of the sandbox to copy from. Raises RequestError where another one is asked for."""
        runtime = self.runtime
        source = runtime.find(copy_from.sandbox)
        if source.state in (SandboxState.CREATING, SandboxState.DELETING):
            raise SandboxNotFound(f"sandbox {source.id} is {source.state}")
        if spec.image not in ("", source.spec.image):
            raise RequestError(
                f"image is {spec.image!r}, that of sandbox {source.id} is {source.spec.image!r}",
                field="image",
            )
        return source.spec.image

    async def _launch(self, sandbox: Sandbox, snapshot: SnapshotRecord | None) -> Answer:
        """Have the image mounted and the sandbox made; the launcher's answer.

        A server that died a moment ago, before anybody was told, is found out here, and by no fault
        of whoever asks: then it is mounted anew.
        """
        runtime = self.runtime
        pauses_s = iter(IMAGE_AGAIN_S)
        copy_from = sandbox.spec.copy_from
        while True:
            started_at = time.monotonic()
            if snapshot is None:
                image, sandbox.mount = await runtime.images.acquire(sandbox.spec.image)
                sandbox.set_image(image.key, image.config)
                _check_same_image(sandbox, runtime.find(copy_from.sandbox) if copy_from else None)
            else:
                sandbox.mount = await acquire(runtime, snapshot)
                sandbox.set_image(snapshot.image_key, snapshot.image_config)
            meta = sandbox.meta()
            _check_meta(meta)
            asked_at = time.monotonic()
            sandbox.phases_ms["image"] = round((asked_at - started_at) * 1000, 3)
            try:
                answer = await self._ask_to_create(sandbox, meta)
            except ImageUnavailable:
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    raise
                runtime.images.forget(sandbox.mount)
                runtime.images.release(sandbox.mount)
                sandbox.mount = None
                await asyncio.sleep(pause_s)
            else:
                sandbox.phases_ms["launcher"] = ms_since(asked_at)
                return answer

    async def _ask_to_create(self, sandbox: Sandbox, meta: dict[str, Any]) -> Answer:
        runtime = self.runtime
        assert sandbox.mount is not None
        spec = sandbox.spec
        with contextlib.ExitStack() as undo:
            fds = []
            if sandbox.program:
                fds.append(os.memfd_create("filter", os.MFD_CLOEXEC))
                undo.callback(os.close, fds[0])
                os.pwrite(fds[0], sandbox.program, 0)
            return await runtime.launcher.call(
                "create",
                fds=fds,
                timeout_s=COPY_TIMEOUT_S if spec.copy_from else CALL_TIMEOUT_S,
                sandbox=sandbox.id,
                images=sandbox.mount.keys,
                snapshot=spec.snapshot,
                limits=spec.limits.as_dict(),
                hostname=spec.hostname,
                network=network_request(sandbox.id, spec, runtime.config),
                mounts=mounts_request(spec),
                copy_from=_asked_of_launcher(spec.copy_from) if spec.copy_from else None,
                meta=meta,
            )


def _check_same_image(sandbox: Sandbox, source: Sandbox | None) -> None:
    if source is not None and source.image_key != sandbox.image_key:
        raise ImageUnavailable(
            f"image {sandbox.spec.image!r} is another file since sandbox {source.id} was made"
        )


def _asked_of_launcher(copy_from: CopyFrom) -> dict[str, Any]:
    paths = [path.lstrip("/").encode() for path in copy_from.paths]
    return {
        "sandbox": copy_from.sandbox,
        "paths": [base64.b64encode(path).decode() for path in paths],
    }


def _check_meta(meta: dict[str, Any]) -> None:
    size = len(encode(meta))
    if size > META_MAX:
        raise RequestError(
            f"environment and labels, the image's included, take {size} bytes of {META_MAX}",
            hint="give large variables with each exec instead",
        )


async def _put(sandbox: Sandbox, file: InlineFile) -> None:
    with FileWrite.open(
        sandbox.control(),
        user=file.user or sandbox.user,
        path=file.path,
        length=len(file.content),
        mode=file.mode,
    ) as write:
        await write.write(file.content)
        await write.finish()


def _phases(ok: dict[str, Any]) -> dict[str, float]:
    """The launcher's phases, as far as they are numbers."""
    phases = ok.get("phases")
    if not isinstance(phases, dict):
        return {}
    return {
        f"launcher.{name}": round(float(value), 3)
        for name, value in phases.items()
        if isinstance(value, int | float)
    }
