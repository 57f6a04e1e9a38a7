"""What one entry of a tar stream, a directory walk or a generated layer is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol

NO_XATTRS: Final[Mapping[bytes, bytes]] = {}

Piece = bytes | memoryview


class Kind(IntEnum):
    """The file types a root file system is made of, and the hard link, which is a name."""

    FILE = 0
    DIRECTORY = 1
    SYMLINK = 2
    HARDLINK = 3
    CHAR_DEVICE = 4
    BLOCK_DEVICE = 5
    FIFO = 6


@dataclass(slots=True)
class Entry:
    """Names are raw bytes; `mode` is the permission bits with setuid, setgid and sticky.

    `path` is as the source spells it (`./usr/bin`, `/usr/bin/`); `names.normalise` settles it.
    `size_bytes` is what `data()` will deliver, holes of a sparse file included.
    """

    path: bytes
    kind: Kind
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_s: int = 0
    size_bytes: int = 0
    link_target: bytes = b""
    major: int = 0
    minor: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=lambda: NO_XATTRS)


class EntryStream(Protocol):
    """One pass over a layer: iterate, and read the data of the entry that iteration stands at."""

    def __iter__(self) -> Iterator[Entry]: ...

    def data(self) -> Iterable[Piece]: ...


# Squashfs can store user., trusted. and security. only. Of these:
#  user.overlay. and trusted.overlay. speak to overlayfs: an image could redirect a lookup or
#    hide what another layer has;
#  security.selinux, .ima, .evm belong to the host's policy, not to an image;
#  the rest of trusted. is invisible without CAP_SYS_ADMIN in the first user namespace.
# user. attributes exist on these only (xattr(7)), and only a file can have capabilities.
XATTR_KINDS: Final = frozenset({Kind.FILE, Kind.DIRECTORY})
_KEPT_EXACTLY: Final = b"security.capability"
_KEPT_PREFIX: Final = b"user."
_DROPPED_PREFIX: Final = b"user.overlay."


def is_kept_xattr(name: bytes) -> bool:
    """Whether an extended attribute goes into an image."""
    if name == _KEPT_EXACTLY:
        return True
    return name.startswith(_KEPT_PREFIX) and not name.startswith(_DROPPED_PREFIX)
