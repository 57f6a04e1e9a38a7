"""A fresh sandbox with some paths of another: what ``create`` does with ``copy_from``.

The copier writes into the new root before its PID 1 has it, so that nothing can run there yet; the
processes of the source are frozen meanwhile, where there are any. A source whose PID 1 has died
still has its files.
"""

from __future__ import annotations

import base64
import errno
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final

from sandboxd.errors import (
    DiskFull,
    FileChanged,
    FileNotFound,
    ImageUnavailable,
    NodeError,
    SandboxdError,
    SymlinkInPath,
    TreeTooLarge,
)
from sandboxd.init.protocol import errno_symbol
from sandboxd.launcher import freeze
from sandboxd.launcher.loop import Loop, Task
from sandboxd.launcher.roots import Fill
from sandboxd.launcher.sandboxes import SERVER_DIED, Sandbox, Sandboxes
from sandboxd.launcher.worker import Handler, Worker
from sandboxd.model import SandboxState
from sandboxd.rootfs.copy import copy_into, copy_layer
from sandboxd.rootfs.overlay import UPPER
from sandboxd.rootfs.transfer import Refused, Transfer

COPY_TIMEOUT_S: Final = 120.0

_REFUSALS: Final[Mapping[str, tuple[type[SandboxdError], str]]] = {
    "missing": (FileNotFound, "is not there"),
    "symlink": (SymlinkInPath, "is a symlink, or leads over one"),
    "too-deep": (TreeTooLarge, "is too deep"),
    "full": (DiskFull, "does not fit the new sandbox's disk"),
    "failed": (FileChanged, "cannot be copied"),
}


class Transfers:
    def __init__(self, loop: Loop, *, sandboxes: Sandboxes, copier: Worker) -> None:
        self._loop = loop
        self._sandboxes = sandboxes
        self._copier = copier

    def fill(self, request: dict[str, Any]) -> Fill | None:
        """What puts the files into a new root, where a ``create`` asks for any.

        Raises SandboxNotFound. It raises FileNotFound, SymlinkInPath, TreeTooLarge, DiskFull,
        FileChanged, ImageUnavailable, SandboxBusy, SandboxExclusive, ProcessesStuck, NodeError.
        """
        asked = request.get("copy_from")
        if asked is None:
            return None
        source = self._sandboxes.find(asked["sandbox"])
        paths = [base64.b64decode(path) for path in asked["paths"]]

        def fill(overlay_fd: int) -> Task[dict[str, float]]:
            states = (SandboxState.RUNNING, SandboxState.FAILED)
            steps = self._copy(source, overlay_fd, paths)
            return (yield from self._sandboxes.change(source, steps, states))

        return fill

    def _copy(self, source: Sandbox, overlay_fd: int, paths: list[bytes]) -> Task[dict[str, float]]:
        slot, root = source.slot, source.root
        if slot is None or root is None:
            raise NodeError("the sandbox has no root")
        alive = source.state is SandboxState.RUNNING and not slot.dead.settled
        began = time.perf_counter()
        try:
            if alive:
                yield from freeze.freeze(self._loop, slot.cgroups)
            asked = self._copier.request(
                "transfer",
                (root.overlay_fd, overlay_fd, *(layer.fd for layer in root.layers)),
                paths=[base64.b64encode(path).decode() for path in paths],
            )
            reply = yield from self._loop.wait(asked, COPY_TIMEOUT_S, "copying files")
        except TimeoutError as error:
            # It may be held up by the source's image: another copy shall not wait for that.
            self._copier.kill()
            raise NodeError(f"{error} took too long") from error
        except OSError as error:
            if error.errno in SERVER_DIED:
                raise ImageUnavailable("the image's server died") from error
            raise NodeError(f"the files could not be copied: {error}") from error
        finally:
            if alive and not source.paused:
                freeze.thaw(slot.cgroups)
        done = reply.value
        if "why" in done:
            kind, words = _REFUSALS[done["why"]]
            path = base64.b64decode(done["path"]).decode("utf-8", "replace")
            raise kind(f"{'/' + path!r} {words}", path="/" + path, errno=done.get("errno"))
        return {
            "ms": round((time.perf_counter() - began) * 1000, 3),
            "entries": done["entries"],
            "bytes": done["bytes"],
            "left_out": done["left_out"],
        }


_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT}


def _refusal(why: str, path: bytes, err: int = 0) -> dict[str, Any]:
    told = {"why": why, "path": base64.b64encode(path).decode()}
    return {**told, "errno": errno_symbol(err)} if err else told


def copy_files(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
    """The copier's ``transfer``. Fds: the source's root, the target's, the source's layers."""
    source, target, *layers = fds
    paths = [base64.b64decode(path) for path in request["paths"]]
    with ExitStack() as undo:
        uppers = []
        for layer in layers:
            uppers.append(os.open(UPPER, os.O_RDONLY | os.O_DIRECTORY, dir_fd=layer))
            undo.callback(os.close, uppers[-1])
        transfer = Transfer(source, target, uppers)
        try:
            transfer.copy(paths)
        except Refused as refused:
            return _refusal(refused.why, refused.path), ()
        except RecursionError:
            return _refusal("too-deep", paths[0]), ()
        except OSError as error:
            if error.errno in SERVER_DIED:
                raise
            # Everything else lies in the two roots: names, sizes, what changed meanwhile.
            why = "full" if error.errno in _NO_ROOM else "failed"
            return _refusal(why, paths[0], error.errno or errno.EIO), ()
    counts = {
        "entries": transfer.entries,
        "bytes": transfer.copied_bytes,
        "left_out": transfer.left_out,
    }
    return counts, ()


def copier_handlers() -> Mapping[str, Handler]:
    """Of a worker of its own: a copy takes as long as there is to copy, and nobody shall wait."""

    def copy(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        if len(fds) > 1:  # into a layer that was made already
            copy_into(fds[0], fds[1])
            return {}, ()
        return {}, (copy_layer(fds[0], request["size_bytes"], request["inodes"]),)

    return {"copy": copy, "transfer": copy_files}
