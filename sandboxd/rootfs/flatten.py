"""Several frozen layers made one that shows the same over whatever they stood on.

OverlayFS's own marks are kept or made: a directory that hid what is below it in any of the layers
is opaque in the one that comes of them. A whiteout stays only where something is below: OverlayFS
would show it, as a device, in a directory that nothing is merged with.

Runs in a worker. Nobody writes to a frozen layer; nothing in one is followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sandboxd.rootfs.copy import copy_leaf, finish
from sandboxd.rootfs.overlay import UPPER

DEPTH_MAX: Final = 256
"""Levels of directories; each holds a descriptor for each layer while one is in it."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OPAQUE: Final = "user.overlay.opaque"


@dataclass(slots=True)
class _Level:
    """A directory: in the layers that have a part in it, highest first, and in the new one."""

    sources: list[tuple[int, int]]
    """Number of the layer, descriptor."""
    target: int
    below: int | None
    """In what the layers stand on, where that shows through."""
    opaque: bool
    names: Iterator[str]
    path: str

    def close(self) -> None:
        for fd in (*(fd for _, fd in self.sources), self.target, self.below):
            if fd is not None:
                os.close(fd)


def merge_layers(layers: Sequence[int], below: int, merged: int) -> None:
    """Put into the empty layer ``merged`` what ``layers``, highest first, show together over the
    open root directory ``below``. Raises OSError: ELOOP for a tree that is too deep."""
    links: dict[tuple[int, int], str] = {}
    walk: list[_Level] = []
    sources = [(n, os.open(UPPER, _DIRECTORY, dir_fd=fd)) for n, fd in enumerate(layers)]
    root = os.open(UPPER, _DIRECTORY, dir_fd=merged)
    walk.append(_level(sources, root, os.dup(below), opaque=False, path=""))
    try:
        while walk:
            level = walk[-1]
            name = next(level.names, None)
            if name is None:
                _finish(level)
                walk.pop().close()
                continue
            lower = _merge(level, name, links, walk[0].target)
            if lower is not None:
                walk.append(lower)
                if len(walk) > DEPTH_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), "flatten")
    finally:
        for level in walk:
            level.close()


def _level(
    sources: list[tuple[int, int]], target: int, below: int | None, *, opaque: bool, path: str
) -> _Level:
    names = {name for _, fd in sources for name in os.listdir(fd)}
    return _Level(sources, target, below, opaque, iter(sorted(names)), path)


def _merge(level: _Level, name: str, links: dict[tuple[int, int], str], root: int) -> _Level | None:
    """Make ``name``; a directory is returned, to be filled."""
    directories: list[tuple[int, int]] = []
    opaque = False
    try:
        for number, source in level.sources:
            found = _stat(source, name)
            if found is None:
                continue
            if not stat.S_ISDIR(found.st_mode):
                if not directories:
                    _make_leaf(level, number, source, name, found, links=links, root=root)
                    return None
                opaque = True
                break
            fd = os.open(name, _DIRECTORY, dir_fd=source)
            directories.append((number, fd))
            if _is_opaque(fd):
                opaque = True
                break
        os.mkdir(name, 0o700, dir_fd=level.target)
        target = os.open(name, _DIRECTORY, dir_fd=level.target)
    except BaseException:
        for _, fd in directories:
            os.close(fd)
        raise
    path = f"{level.path}{name}/"
    below = None if opaque else _open_below(level.below, name)
    return _level(directories, target, below, opaque=opaque, path=path)


def _make_leaf(
    level: _Level,
    number: int,
    source: int,
    name: str,
    found: os.stat_result,
    *,
    links: dict[tuple[int, int], str],
    root: int,
) -> None:
    whiteout = stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
    if whiteout and (level.below is None or _stat(level.below, name) is None):
        return
    if found.st_nlink > 1 and not whiteout:
        # Overlay links whiteouts of its own to one inode; those are made anew.
        first = links.setdefault((number, found.st_ino), level.path + name)
        if first != level.path + name:
            os.link(first, name, src_dir_fd=root, dst_dir_fd=level.target, follow_symlinks=False)
            return
    copy_leaf(source, level.target, name, found)


def _finish(level: _Level) -> None:
    source = level.sources[0][1]
    finish(source, level.target, os.fstat(source))
    if level.opaque:
        os.setxattr(level.target, _OPAQUE, b"y")


def _open_below(below: int | None, name: str) -> int | None:
    if below is None:
        return None
    try:
        return os.open(name, _DIRECTORY, dir_fd=below)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def _stat(dir_fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_opaque(fd: int) -> bool:
    with suppress(OSError):  # ENODATA
        return os.getxattr(fd, _OPAQUE) == b"y"
    return False
