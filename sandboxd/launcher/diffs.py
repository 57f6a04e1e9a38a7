"""What a sandbox or a snapshot has that its image or another snapshot has not.

A child of its own for each comparison mounts both roots, compares them (``rootfs/compare.py``) and
writes what it finds into a pipe of the daemon's: one JSON object a line, or a tar in the form of an
OCI layer. It has the launcher's rights over the node's user namespace and none over the host, and
is killed when it takes too long: what it reads is a sandbox's, trees of any shape included.

A list is told of one moment: the sandbox's processes are frozen for it. A tar takes as long as
whoever reads it, and is told file by file.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import stat
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.errors import (
    DiffUnspeakable,
    FileChanged,
    ImageUnavailable,
    NodeError,
    RequestError,
    SandboxdError,
    TreeTooLarge,
)
from sandboxd.launcher import freeze
from sandboxd.launcher.images import Images
from sandboxd.launcher.layers import Layer, Layers, Stack
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.sandboxes import SERVER_DIED, Sandbox, Sandboxes
from sandboxd.launcher.worker import Handler, Worker
from sandboxd.model import SandboxState
from sandboxd.rootfs import layer_tar
from sandboxd.rootfs.compare import Change, TooDeep, compare
from sandboxd.rootfs.overlay import UPPER, make_view

LIST_TIMEOUT_S: Final = 60.0
TAR_TIMEOUT_S: Final = 600.0
AT_ONCE_MAX: Final = 4
WAITING_MAX: Final = 64
PAGE_BYTES: Final = 8 << 20
"""Of the lines of one list; paths are 4 KiB at most, so many more entries than one always fit."""
TAR_ENTRIES_MAX: Final = 200_000
"""They are held in the child's memory, some 600 bytes each."""
_LAYERS_MAX: Final = 56
"""Descriptors of one message, with the two roots and the pipe: ``protocol.FDS_MAX``."""

_CHANGED: Final = {
    errno.ESTALE,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENXIO,
    errno.EXDEV,
}
"""What comes of names that became something else between two looks at them."""

_TYPES: Final = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char-device",
    stat.S_IFBLK: "block-device",
}


@dataclass(frozen=True, slots=True)
class _View:
    """One side: layers over images, mounted already (``fd``) or not."""

    layers: tuple[Layer, ...]
    images: tuple[str, ...]
    fd: int | None = None


class Diffs:
    def __init__(
        self,
        loop: Loop,
        *,
        sandboxes: Sandboxes,
        images: Images,
        layers: Layers,
        images_dir: str,
        attached: bool,
    ) -> None:
        """``attached``: whether layers lie in ``images_dir`` by their names (``staging.py``)."""
        self._loop = loop
        self._sandboxes = sandboxes
        self._images = images
        self._layers = layers
        self._images_dir = images_dir
        self._attached = attached
        self._running = 0
        self._waiting: deque[Promise[None]] = deque()

    def of_sandbox(
        self, sandbox: Sandbox, since: Stack | None, request: dict[str, Any], pipe: int
    ) -> Task[dict[str, Any]]:
        """Write what it has now into ``pipe``. Raises as ``of_snapshot``, and SandboxBusy,
        SandboxExclusive, SandboxLost, ProcessesStuck."""
        tar = request["form"] == "tar"
        since = since or Stack((), sandbox.images)
        self._layers.share(since.layers)
        pipe = os.dup(pipe)

        def steps() -> Task[dict[str, Any]]:
            slot, root = sandbox.slot, sandbox.root
            if slot is None or root is None:
                raise NodeError("the sandbox has no root")
            if since.images != sandbox.images:
                raise RequestError("the snapshot is of another image", field="query.since")
            new = _View(root.layers, sandbox.images, root.overlay_fd)
            alive = sandbox.state is SandboxState.RUNNING and not slot.dead.settled
            frozen = alive and not tar and not sandbox.paused
            try:
                if frozen:
                    yield from freeze.freeze(self._loop, slot.cgroups)
                return (yield from self._compare(since, new, request, pipe))
            finally:
                if frozen:
                    freeze.thaw(slot.cgroups)

        try:
            with self._turn() as turn:
                yield turn
                if tar:
                    # Whoever resets it meanwhile takes nothing away: the child has all of it open.
                    return (yield from steps())
                states = (SandboxState.RUNNING, SandboxState.FAILED)
                return (yield from self._sandboxes.change(sandbox, steps(), states))
        finally:
            os.close(pipe)
            self._layers.release(since.layers)

    def of_snapshot(
        self, stack: Stack, since: Stack | None, request: dict[str, Any], pipe: int
    ) -> Task[dict[str, Any]]:
        """Write what a snapshot has into ``pipe``; answers ``entries`` and whether there are
        ``more``. Raises TreeTooLarge, FileChanged, DiffUnspeakable, ImageUnavailable, NodeError."""
        since = since or Stack((), stack.images)
        if since.images != stack.images:
            raise RequestError("the snapshot is of another image", field="query.since")
        held = (*stack.layers, *since.layers)
        self._layers.share(held)
        pipe = os.dup(pipe)
        try:
            with self._turn() as turn:
                yield turn
                new = _View(stack.layers, stack.images)
                return (yield from self._compare(since, new, request, pipe))
        finally:
            os.close(pipe)
            self._layers.release(held)

    @contextmanager
    def _turn(self) -> Generator[Promise[None], None, None]:
        """Wait for one of ``AT_ONCE_MAX`` places, and give it back."""
        turn: Promise[None] = Promise()
        if self._running < AT_ONCE_MAX:
            self._running += 1
            turn.resolve(None)
        elif len(self._waiting) < WAITING_MAX:
            self._waiting.append(turn)
        else:
            raise NodeError("too many comparisons at once")
        try:
            yield turn
        finally:
            if self._waiting:
                self._waiting.popleft().resolve(None)
            else:
                self._running -= 1

    def _compare(
        self, since: Stack, new: _View, request: dict[str, Any], pipe: int
    ) -> Task[dict[str, Any]]:
        shared = set(since.layers) & set(new.layers)
        own = [layer for layer in new.layers if layer not in shared]
        touched = [*own, *(layer for layer in since.layers if layer not in shared)]
        fds: list[int] = [pipe]

        def side(view: _View | Stack) -> dict[str, Any]:
            fd = view.fd if isinstance(view, _View) else None
            told: dict[str, Any] = {
                "lowers": [self._images.mounted(key).name for key in reversed(view.images)],
                "layers": list(range(len(fds), len(fds) + len(view.layers))),
                "attached": [one.name for one in view.layers] if self._attached else None,
                "mounted": None,
            }
            fds.extend(layer.fd for layer in view.layers)
            if fd is not None:
                told["mounted"] = len(fds)
                fds.append(fd)
            return told

        sides = [side(since), side(new)]
        places = {layer.fd: fds.index(layer.fd) for layer in touched}
        if len(fds) > _LAYERS_MAX:
            raise TreeTooLarge("the two stand on too many layers together")
        # One child for each: a comparison that a stopped image server holds up is nobody else's.
        worker = Worker(self._loop, "differ", lambda: _handlers(self._images_dir))
        seconds = TAR_TIMEOUT_S if request["form"] == "tar" else LIST_TIMEOUT_S
        try:
            asked = worker.request(
                str(request["form"]),
                tuple(fds),
                sides=sides,
                touched=list(places.values()),
                own=len(own),
                after=request.get("after"),
                limit=int(request.get("limit") or 0),
                most=int(request.get("most") or 0),
            )
            reply = yield from self._loop.wait(asked, seconds, "comparing")
        except TimeoutError as error:
            if not (yield from self._images.answer(new.images)):
                raise ImageUnavailable("the image's server does not answer") from error
            raise TreeTooLarge(f"it cannot be compared within {seconds:.0f} s") from error
        except OSError as error:
            raise self._failure(error) from error
        finally:
            worker.kill()
        return _answer(reply.value)

    def _failure(self, error: OSError) -> SandboxdError:
        if error.errno in SERVER_DIED:
            return ImageUnavailable("the image's server died")
        if error.errno in _CHANGED:
            return FileChanged("a file changed while it was read")
        return NodeError(f"the roots could not be compared: {error}")


def _answer(value: dict[str, Any]) -> dict[str, Any]:
    why = value.get("why")
    if why is None:
        return value
    path = "/" + base64.b64decode(value.get("path", "")).decode("utf-8", "replace")
    if why == "too-deep":
        raise TreeTooLarge(f"{path[:200]!r} is too deep", path=path)
    if why == "unspeakable":
        raise DiffUnspeakable(
            f"{path!r} cannot be told in a layer, where it would mean something else", path=path
        )
    raise TreeTooLarge("it has more entries or bytes than one tar may")


def _handlers(images_dir: str) -> Mapping[str, Handler]:
    """Of the child."""

    def listed(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        after = request["after"]
        entries = written = 0
        with ExitStack() as undo:
            old, new, touched = _roots(undo, images_dir, request, fds)
            out = undo.enter_context(os.fdopen(os.dup(fds[0]), "wb"))
            changes = compare(
                old,
                new,
                touched,
                request["own"],
                None if after is None else base64.b64decode(after),
            )
            try:
                for change in changes:
                    if entries == request["limit"] or written > PAGE_BYTES:
                        return {"entries": entries, "more": True}, ()
                    line = json.dumps(_row(change), separators=(",", ":")).encode() + b"\n"
                    written += len(line)
                    entries += 1
                    out.write(line)
            except TooDeep as error:
                return _refusal("too-deep", error.path), ()
            except BrokenPipeError:
                pass  # nobody reads it any more
            finally:
                changes.close()  # type: ignore[attr-defined]
        return {"entries": entries, "more": False}, ()

    def tar(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        found: list[Change] = []
        with ExitStack() as undo:
            old, new, touched = _roots(undo, images_dir, request, fds)
            try:
                for change in compare(old, new, touched, request["own"]):
                    found.append(change)
                    if len(found) > TAR_ENTRIES_MAX:
                        return _refusal("too-large"), ()
            except TooDeep as error:
                return _refusal("too-deep", error.path), ()
            if layer_tar.content_bytes(found) > request["most"]:
                return _refusal("too-large"), ()
            path = layer_tar.unspeakable(found)
            if path is not None:
                return _refusal("unspeakable", path), ()
            out = undo.enter_context(os.fdopen(os.dup(fds[0]), "wb", buffering=0))
            layer_tar.write_layer(new, found, out)
        return {"entries": len(found), "more": False}, ()

    return {"list": listed, "tar": tar}


def _roots(
    undo: ExitStack, images_dir: str, request: dict[str, Any], fds: list[int]
) -> tuple[int, int, list[int]]:
    """Both roots, and what they do not share."""
    roots = []
    for side in request["sides"]:
        if side["mounted"] is not None:
            root = os.dup(fds[side["mounted"]])
        else:
            layers = [fds[one] for one in side["layers"]]
            root = make_view(images_dir, side["lowers"], layers, side["attached"])
        undo.callback(os.close, root)
        roots.append(root)
    touched = []
    for one in request["touched"]:
        touched.append(os.open(UPPER, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fds[one]))
        undo.callback(os.close, touched[-1])
    return roots[0], roots[1], touched


def _row(change: Change) -> dict[str, Any]:
    found = change.status
    target = None if change.target is None else base64.b64encode(change.target).decode()
    return {
        "path": base64.b64encode(b"/" + change.path).decode(),
        "change": change.how,
        "what": change.what,
        "type": _TYPES.get(stat.S_IFMT(found.st_mode), "unknown"),
        "mode": stat.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "size": found.st_size if stat.S_ISREG(found.st_mode) else 0,
        "target": target,
    }


def _refusal(why: str, path: bytes = b"") -> dict[str, Any]:
    return {"why": why, "path": base64.b64encode(path).decode()}
