"""A copy of a writable layer: its files as OverlayFS keeps them, whiteouts and attributes included.

Runs in a worker. Nothing of the layer is followed or trusted: every step is relative to an open
directory, and the only process that writes to it is frozen meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from sandboxd.rootfs.overlay import UPPER, make_writable_layer

_CHUNK: Final = 1 << 24
_SMALL: Final = 1 << 16
"""Bytes of a file that is worth no look for holes."""


def copy_layer(tmpfs_fd: int, size_bytes: int, inodes: int) -> int:
    """A new layer with the content of another; returns its mount's descriptor. Raises OSError."""
    copy_fd = make_writable_layer(size_bytes, inodes)
    try:
        copy_into(tmpfs_fd, copy_fd)
    except BaseException:
        os.close(copy_fd)
        raise
    return copy_fd


def copy_into(layer_fd: int, copy_fd: int) -> None:
    """Copy the content of a layer into an empty one. Raises OSError: ELOOP for a tree that is too
    deep, as what a sandbox makes has no end."""
    with ExitStack() as undo:
        source = os.open(UPPER, os.O_RDONLY | os.O_DIRECTORY, dir_fd=layer_fd)
        undo.callback(os.close, source)
        target = os.open(UPPER, os.O_RDONLY | os.O_DIRECTORY, dir_fd=copy_fd)
        undo.callback(os.close, target)
        try:
            _copy_directory(source, target, os.fstat(source), Links(target))
        except RecursionError:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), "copy") from None


@dataclass
class Links:
    """Files with several names, by inode: the one under which each was copied first. Names and not
    descriptors, of which there are fewer than files. Nothing but us moves anything in the copy."""

    target: int
    at: list[str] = field(default_factory=list)
    """Names of the directories on the way to where the copy is now."""
    names: dict[int, str] = field(default_factory=dict)


def _copy_directory(source: int, target: int, status: os.stat_result, links: Links) -> None:
    """Everything in the open directory ``source`` into the open directory ``target``."""
    with os.scandir(source) as entries:
        for entry in entries:
            name, found = entry.name, entry.stat(follow_symlinks=False)
            mode = found.st_mode
            if not stat.S_ISDIR(mode) and found.st_nlink > 1 and _link(found, name, target, links):
                continue
            if stat.S_ISDIR(mode):
                os.mkdir(name, 0o700, dir_fd=target)
                below = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source)
                try:
                    into = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=target)
                    try:
                        links.at.append(name)
                        _copy_directory(below, into, found, links)
                        links.at.pop()
                    finally:
                        os.close(into)
                finally:
                    os.close(below)
            else:
                copy_leaf(source, target, name, found)
    finish(source, target, status)


def copy_leaf(source: int, target: int, name: str, found: os.stat_result) -> None:
    """What is no directory, with all its attributes. Raises OSError."""
    mode = found.st_mode
    if stat.S_ISREG(mode):
        _copy_file(source, target, name, found)
        return
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    else:  # a whiteout is a character device 0:0; FIFOs and sockets are what they are
        os.mknod(name, mode, found.st_rdev, dir_fd=target)
    os.chown(name, found.st_uid, found.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(mode) and not stat.S_ISCHR(mode):
        os.chmod(name, stat.S_IMODE(mode), dir_fd=target)
    _times(name, found, target)


def _link(found: os.stat_result, name: str, target: int, links: Links) -> bool:
    """Make a hard link to a name of the same file that was copied before; False for the first."""
    first = links.names.get(found.st_ino)
    if first is None:
        links.names[found.st_ino] = "/".join((*links.at, name))
        return False
    os.link(first, name, src_dir_fd=links.target, dst_dir_fd=target, follow_symlinks=False)
    return True


def _copy_file(source: int, target: int, name: str, found: os.stat_result) -> None:
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
    try:
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
        try:
            copy_content(reading, writing, found)
            finish(reading, writing, found)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def copy_content(reading: int, writing: int, found: os.stat_result) -> None:
    """All of a file into an empty one of the same size, holes included."""
    if 0 < found.st_size <= _SMALL and found.st_blocks * 512 >= found.st_size:
        # In two calls: most files are small, and without a hole.
        data = os.read(reading, _SMALL + 1)
        if len(data) == found.st_size == os.write(writing, data):
            return
        os.lseek(writing, 0, os.SEEK_SET)
    if found.st_blocks:
        copy_data(reading, writing, found.st_size)
    os.ftruncate(writing, found.st_size)


def copy_data(reading: int, writing: int, size: int) -> None:
    """The parts that hold data; a hole stays one."""
    at = 0
    while at < size:
        try:
            at = os.lseek(reading, at, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole to the end
            return
        end = os.lseek(reading, at, os.SEEK_HOLE)
        os.lseek(writing, at, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(writing, reading, at, min(_CHUNK, end - at))
            if sent == 0:
                return
            at += sent


def finish(source: int, target: int, found: os.stat_result) -> None:
    """Attributes last: a change of owner clears setuid and capabilities."""
    os.fchown(target, found.st_uid, found.st_gid)
    os.fchmod(target, stat.S_IMODE(found.st_mode))
    for key in os.listxattr(source):
        os.setxattr(target, key, os.getxattr(source, key))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _times(name: str, found: os.stat_result, target: int) -> None:
    os.utime(
        name,
        ns=(found.st_atime_ns, found.st_mtime_ns),
        dir_fd=target,
        follow_symlinks=False,
    )
