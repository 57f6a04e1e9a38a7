"""What one root has that another has not, where both stand on the same images.

Both are mounts that OverlayFS has put together, so what a whiteout hides, an opaque directory or an
attribute alone that was copied up means is the kernel's to say and not ours. The layers that they
do not share say only where to look: a comparison costs what was written and not what there is.

A name is

- ``added`` where the older root has none, ``removed`` where the newer has none. A directory that is
  gone is told once, what was in it not; one that is new is told with all that is in it;
- ``changed`` where ``what`` is not empty: ``type`` alone, or any of ``mode``, ``owner``,
  ``xattrs``, ``content`` (size included), ``target`` (of a symlink), ``device`` and ``links``
  (whether it shares its inode with as many names). Times are not compared: every write to a
  directory is one. What was written and is as it was before is no change.

Runs in a worker that may read all of both roots. Nothing is followed: every name is opened below
the directory that it is in. Neither root need stand still; then it is told what was found.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sandboxd.linux.openat2 import openat2

DEPTH_MAX: Final = 256
"""Levels of directories. Each holds a descriptor for each root and layer while one is in it."""
PATH_MAX: Final = 4095
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_ATTRIBUTES: Final = ("user.", "security.capability", "system.posix_acl_")
"""Those that a process in a sandbox can set."""
_CHUNK: Final = 1 << 20
_OPAQUE: Final = "user.overlay.opaque"


class TooDeep(Exception):
    """At ``path``, relative to the root."""

    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.path = path


@dataclass(frozen=True, slots=True)
class Change:
    path: bytes
    """Relative to the root."""
    how: str
    """``added``, ``changed`` or ``removed``."""
    what: tuple[str, ...]
    status: os.stat_result
    """Of the newer root; of the older one for what was removed."""
    target: bytes | None = None
    """Of a symlink."""
    attributes: dict[str, bytes] | None = None
    """Of a file or directory that is there, if it has any."""
    inode: tuple[int, int] | None = None
    """The same for all names of one file, of those that have several. Not of ``status``: OverlayFS
    shows a file that was copied up under the number it had in the image, and its new names under
    another."""


@dataclass(slots=True)
class _Level:
    """One directory: open in the newer root, in the older one if it is there too, in each layer."""

    path: bytes
    new: int
    old: int | None
    layers: list[int]
    own: int
    """How many of them, from the first, are the newer root's."""
    names: Iterator[bytes]

    def close(self) -> None:
        for fd in (self.new, self.old, *self.layers):
            if fd is not None:
                os.close(fd)


def compare(
    old: int, new: int, layers: Sequence[int], own: int, after: bytes | None = None
) -> Iterator[Change]:
    """Every change, a directory before what is in it, names in the order of their bytes.

    ``old`` and ``new`` are open root directories, ``layers`` those of every layer that is in one of
    the roots and not in both: ``own`` of the newer root, highest first, then the older one's.
    ``after``: nothing up to this path. Raises TooDeep, OSError.
    """
    passed = tuple(after.split(b"/")) if after is not None else ()
    root = _open(_Level(b"", new, old, list(layers), own, iter(())), b".", b"", both=True)
    walk = [root]
    if not passed:
        # A root has no name to be added under, but it has attributes.
        yield from _told(b"", os.fstat(old), os.fstat(new), root, b".")
    try:
        while walk:
            level = walk[-1]
            name = next(level.names, None)
            if name is None:
                walk.pop().close()
                continue
            path = level.path + b"/" + name if level.path else name
            parts = tuple(path.split(b"/")) if passed else ()
            ahead = parts == passed[: len(parts)]
            if passed and parts < passed and not ahead:
                continue
            before = None if level.old is None else _stat(level.old, name)
            now = _stat(level.new, name)
            if before is None and now is None:
                continue
            if not (passed and ahead):
                yield from _told(path, before, now, level, name)
            if now is not None and stat.S_ISDIR(now.st_mode):
                if len(walk) == DEPTH_MAX or len(path) > PATH_MAX:
                    raise TooDeep(path[:PATH_MAX])
                both = before is not None and stat.S_ISDIR(before.st_mode)
                below = _enter(level, name, path, both=both)
                if below is not None:
                    walk.append(below)
    finally:
        for level in walk:
            level.close()


def _enter(level: _Level, name: bytes, path: bytes, *, both: bool) -> _Level | None:
    try:
        return _open(level, name, path, both=both)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
            # Gone since, or something else; or /proc or its like, where an image had no place for
            # it: what is mounted there is not of this root.
            return None
        raise


def _open(above: _Level, name: bytes, path: bytes, *, both: bool) -> _Level:
    """The level below ``name``; with ``both`` it is a directory in the older root too."""
    level = _Level(path, openat2(above.new, name, _DIRECTORY), None, [], 0, iter(()))
    try:
        if both and above.old is not None:
            level.old = openat2(above.old, name, _DIRECTORY)
        everything = level.old is None
        for number, layer in enumerate(above.layers):
            try:
                level.layers.append(openat2(layer, name, _DIRECTORY))
                level.own += number < above.own
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    everything = True  # a whiteout or a file: it hides what is below it
                elif error.errno != errno.ENOENT:
                    raise
        names = set[str]()
        if everything or any(_is_opaque(layer) for layer in level.layers):
            for root in (level.new, level.old):
                if root is not None:
                    names.update(os.listdir(root))
        else:
            for layer in level.layers:
                names.update(os.listdir(layer))
        level.names = iter(sorted(os.fsencode(one) for one in names))
    except BaseException:
        level.close()
        raise
    return level


def _is_opaque(layer: int) -> bool:
    with suppress(OSError):  # ENODATA
        return os.getxattr(layer, _OPAQUE) in (b"y", b"x")
    return False


def _told(
    path: bytes,
    before: os.stat_result | None,
    now: os.stat_result | None,
    level: _Level,
    name: bytes,
) -> Iterator[Change]:
    try:
        if now is None:
            assert before is not None
            yield Change(path, "removed", (), before)
            return
        target = _target(level.new, name, now)
        attributes = _attributes(level.new, name, now)
        inode = _inode(level, name, now)
        if before is None:
            yield Change(path, "added", (), now, target, attributes, inode)
            return
        assert level.old is not None
        what = _what(level.old, level.new, name, before, now)
    except FileNotFoundError:
        return  # it is gone since
    if what:
        yield Change(path, "changed", what, now, target, attributes, inode)


def _inode(level: _Level, name: bytes, now: os.stat_result) -> tuple[int, int] | None:
    if stat.S_ISDIR(now.st_mode) or now.st_nlink < 2:
        return None
    for layer in level.layers[: level.own]:
        found = _stat(layer, name)
        if found is not None:
            return found.st_dev, found.st_ino
    return now.st_dev, now.st_ino


def _what(
    old: int, new: int, name: bytes, before: os.stat_result, now: os.stat_result
) -> tuple[str, ...]:
    if stat.S_IFMT(before.st_mode) != stat.S_IFMT(now.st_mode):
        return ("type",)
    found = []
    if before.st_mode != now.st_mode:
        found.append("mode")
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        found.append("owner")
    if _attributes(old, name, before) != _attributes(new, name, now):
        found.append("xattrs")
    if stat.S_ISREG(now.st_mode):
        if before.st_size != now.st_size or not _same_content(old, new, name, now.st_size):
            found.append("content")
    elif stat.S_ISLNK(now.st_mode):
        if _target(old, name, before) != _target(new, name, now):
            found.append("target")
    elif (stat.S_ISCHR(now.st_mode) or stat.S_ISBLK(now.st_mode)) and (
        before.st_rdev != now.st_rdev
    ):
        found.append("device")
    if not stat.S_ISDIR(now.st_mode) and before.st_nlink != now.st_nlink:
        found.append("links")
    return tuple(found)


def _stat(dir_fd: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _target(dir_fd: int, name: bytes, found: os.stat_result) -> bytes | None:
    return os.readlink(name, dir_fd=dir_fd) if stat.S_ISLNK(found.st_mode) else None


def _attributes(dir_fd: int, name: bytes, found: os.stat_result) -> dict[str, bytes] | None:
    """Only files and directories have any (xattr(7))."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return None
    fd = _open_for_reading(dir_fd, name)
    if fd is None:
        return None
    try:
        return {
            key: os.getxattr(fd, key) for key in os.listxattr(fd) if key.startswith(_ATTRIBUTES)
        } or None
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENODATA):
            return None
        raise
    finally:
        os.close(fd)


def _open_for_reading(dir_fd: int, name: bytes) -> int | None:
    """None where it is something else meanwhile."""
    try:
        return openat2(dir_fd, name, _FILE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EXDEV):
            return None
        raise


def _same_content(old: int, new: int, name: bytes, size: int) -> bool:
    """Of two regular files of the same size. Holes are not read."""
    one, other = _open_for_reading(old, name), _open_for_reading(new, name)
    try:
        if one is None or other is None:
            return False
        at = 0
        while at < size:
            at = min(_data(one, at, size), _data(other, at, size))
            length = min(_CHUNK, size - at)
            data = os.pread(one, length, at)
            if data != os.pread(other, length, at):
                return False
            if not data:
                break
            at += len(data)
        return True
    finally:
        for fd in (one, other):
            if fd is not None:
                os.close(fd)


def _data(fd: int, at: int, size: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole to the end
            return size
        raise
