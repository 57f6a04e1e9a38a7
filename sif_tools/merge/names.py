"""Names as layers spell them, made comparable; what overlay tools hide in names, made explicit."""

from __future__ import annotations

from enum import Enum
from typing import Final

from sif_tools.errors import BadEntry

WHITEOUT_PREFIX: Final = b".wh."
# What aufs kept for itself in a branch (`.wh..wh.plnk`, `.wh..wh.aufs` …): never an image's.
_AUFS_PREFIX: Final = b".wh..wh."
_OPAQUE: Final = b".wh..wh..opq"
# The index and the marks of lazily pulled layers, at the root of the layer.
_ESTARGZ: Final = frozenset({b"stargz.index.json", b".prefetch.landmark", b".no.prefetch.landmark"})

# NAME_MAX, PATH_MAX and the longest symlink that Linux makes: beyond them no sandbox could use it.
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 4095


class Marker(Enum):
    """What an OCI layer's entry stands for."""

    NONE = "an ordinary entry"
    WHITEOUT = "hides a name of lower layers"
    OPAQUE = "hides all lower content of its directory"
    IGNORED = "belongs to a tool, not to the image"


def normalise(path: bytes) -> bytes:
    """`./a//b/` and `/a/b` are `a/b`; the root is empty. BadEntry for `..` and what is too long."""
    if path.startswith((b"/", b".")) or path.endswith(b"/") or b"//" in path or b"/." in path:
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise BadEntry("'..' in a path", entry=path)
        path = b"/".join(parts)
    if b"\0" in path:
        raise BadEntry("NUL in a path", entry=path)
    if len(path) > _MAX_NAME_BYTES:
        if len(path) > _MAX_PATH_BYTES:
            raise BadEntry(f"path of {len(path)} bytes, Linux takes {_MAX_PATH_BYTES}", entry=path)
        if max(map(len, path.split(b"/"))) > _MAX_NAME_BYTES:
            raise BadEntry(f"a name longer than {_MAX_NAME_BYTES} bytes", entry=path)
    return path


def check_symlink(target: bytes, path: bytes) -> None:
    """A symlink's target may be any text, but a usable one."""
    if not target or b"\0" in target or len(target) > _MAX_PATH_BYTES:
        raise BadEntry("symlink target is empty, too long or has a NUL", entry=path)


def marker(path: bytes) -> tuple[Marker, bytes]:
    """What a normalised path of an OCI layer stands for, and the path that this is about."""
    if path in _ESTARGZ:
        return Marker.IGNORED, path
    if WHITEOUT_PREFIX not in path:
        return Marker.NONE, path
    parent, _, name = path.rpartition(b"/")
    for part in parent.split(b"/"):
        if part.startswith(_AUFS_PREFIX):
            return Marker.IGNORED, path
        if part.startswith(WHITEOUT_PREFIX):
            raise BadEntry("an entry below a whiteout", entry=path)
    if name == _OPAQUE:
        return Marker.OPAQUE, parent
    if name.startswith(_AUFS_PREFIX):
        return Marker.IGNORED, path
    if not name.startswith(WHITEOUT_PREFIX):
        return Marker.NONE, path
    hidden = name[len(WHITEOUT_PREFIX) :]
    if hidden in (b"", b".", b".."):
        raise BadEntry("a whiteout that names nothing", entry=path)
    return Marker.WHITEOUT, parent + b"/" + hidden if parent else hidden
