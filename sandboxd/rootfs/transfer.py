"""Files of one sandbox's root, put into another's that nothing runs in yet.

Runs in a worker that may read and write all of both roots, so nothing of the source decides where:
every name is opened below the directory that it is in, no symlink and no mount on the way
(``linux.openat2``), and the source's processes are frozen meanwhile. At each path the target then
has what the source has, and nothing else: owners, modes, times, hard links, user attributes, ACLs
and file capabilities included.

Both roots stand on the same images. What the source has never written to is the same in both and is
passed over, so a copy costs what was written and not what there is.

Symlinks within a tree are copied as what they are. A named path that is one, or that leads over
one, is refused. Sockets and devices are left out.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from sandboxd.linux.openat2 import openat2
from sandboxd.rootfs.copy import copy_data

DEPTH_MAX: Final = 256
"""Levels of directories. Each takes three descriptors while one is in it."""
_PATH_MAX: Final = 4095
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
"""Without O_NOFOLLOW, with which a symlink would be ENOTDIR and not ELOOP."""
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_ATTRIBUTES: Final = ("user.", "security.capability", "system.posix_acl_")
"""Those that a process in a sandbox can set."""


class Refused(Exception):
    """``why``: ``missing``, ``symlink`` or ``too-deep``, at ``path``."""

    def __init__(self, why: str, path: bytes) -> None:
        super().__init__(why)
        self.why = why
        self.path = path


@dataclass
class Transfer:
    """``source`` and ``target`` are mounts' roots, ``layers`` what the source has written: the open
    directories of its uppers, its snapshots' included."""

    source: int
    target: int
    layers: Sequence[int]
    entries: int = 0
    """Copied or made."""
    copied_bytes: int = 0
    left_out: int = 0
    """Sockets and devices."""
    _links: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def copy(self, paths: Sequence[bytes]) -> None:
        """Each is relative to the root, without empty, ``.`` or ``..`` parts. Raises Refused and
        OSError; what is in the target is of no use then."""
        for path in paths:
            if not any(path.startswith(other + b"/") for other in paths):
                self._copy_path(path)

    def _copy_path(self, path: bytes) -> None:
        above, _, name = path.rpartition(b"/")
        with ExitStack() as undo:
            try:
                source = openat2(self.source, above or b".", _DIRECTORY)
                undo.callback(os.close, source)
                found = os.stat(name, dir_fd=source, follow_symlinks=False)
            except OSError as error:
                raise _refusal(error, path) from error
            if stat.S_ISLNK(found.st_mode):
                raise Refused("symlink", path)
            if not self._written(path):
                return
            target = self._make_parents(above)
            undo.callback(os.close, target)
            self._copy_entry(source, target, name, path, found)

    def _make_parents(self, path: bytes) -> int:
        """The directory ``path`` of the target; those that are missing belong to its root."""
        at = os.open(".", _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.target)
        for name in path.split(b"/") if path else ():
            try:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=at)
                    os.chown(name, 0, 0, dir_fd=at, follow_symlinks=False)
                below = openat2(at, name, _DIRECTORY)
            except OSError as error:
                raise _refusal(error, path) from error
            finally:
                os.close(at)
            at = below
        return at

    def _written(self, path: bytes) -> bool:
        for layer in self.layers:
            with suppress(OSError):
                os.close(openat2(layer, path, os.O_PATH | os.O_NOFOLLOW))
                return True
        return False

    # --- one entry ---------------------------------------------------------------------------

    def _copy_entry(
        self, source: int, target: int, name: bytes, path: bytes, found: os.stat_result
    ) -> None:
        """What is called ``name`` in two open directories, and all that is below it."""
        walk = [self._enter(source, target, name, path, found)]
        while walk:
            step = next(walk[-1], None)
            if step is None:
                walk.pop()
            elif len(walk) == DEPTH_MAX or len(step[3]) > _PATH_MAX:
                for one in walk:
                    one.close()
                raise Refused("too-deep", step[3][:_PATH_MAX])
            else:
                walk.append(self._enter(*step))

    def _enter(
        self, source: int, target: int, name: bytes, path: bytes, found: os.stat_result
    ) -> Generator[Any, None, None]:
        """Copy one entry; yields the arguments of those below a directory, before it is done."""
        mode = found.st_mode
        if not stat.S_ISDIR(mode):
            _remove(target, name)
            self._copy_file(source, target, name, path, found)
            return
        with ExitStack() as undo:
            if not _is_directory(target, name):
                _remove(target, name)
                os.mkdir(name, 0o700, dir_fd=target)
            self.entries += 1
            below = openat2(source, name, _DIRECTORY)
            undo.callback(os.close, below)
            into = openat2(target, name, _DIRECTORY)
            undo.callback(os.close, into)
            for extra in [one for one in os.listdir(into) if not _exists(below, one)]:
                _remove(into, os.fsencode(extra))
            with os.scandir(below) as entries:
                for entry in entries:
                    child = os.fsencode(entry.name)
                    where = path + b"/" + child
                    if self._written(where):
                        yield below, into, child, where, entry.stat(follow_symlinks=False)
            _finish(below, into, found)

    def _copy_file(
        self, source: int, target: int, name: bytes, path: bytes, found: os.stat_result
    ) -> None:
        mode, inode = found.st_mode, (found.st_dev, found.st_ino)
        if stat.S_ISSOCK(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            self.left_out += 1
            return
        self.entries += 1
        if found.st_nlink > 1 and inode in self._links:
            os.link(
                self._links[inode],
                name,
                src_dir_fd=self.target,
                dst_dir_fd=target,
                follow_symlinks=False,
            )
            return
        if stat.S_ISREG(mode):
            with ExitStack() as undo:
                reading = openat2(source, name, _FILE)
                undo.callback(os.close, reading)
                found = os.fstat(reading)
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "copy")
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                writing = os.open(name, flags, 0o600, dir_fd=target)
                undo.callback(os.close, writing)
                copy_data(reading, writing, found.st_size)
                os.ftruncate(writing, found.st_size)
                _finish(reading, writing, found)
                self.copied_bytes += found.st_size
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            os.chown(name, found.st_uid, found.st_gid, dir_fd=target, follow_symlinks=False)
            _times(target, name, found)
        else:
            os.mkfifo(name, 0o600, dir_fd=target)
            os.chown(name, found.st_uid, found.st_gid, dir_fd=target, follow_symlinks=False)
            os.chmod(name, stat.S_IMODE(mode), dir_fd=target)
            _times(target, name, found)
        if found.st_nlink > 1:
            self._links[inode] = path


def _refusal(error: OSError, path: bytes) -> Exception:
    why = {
        errno.ENOENT: "missing",
        errno.ENOTDIR: "missing",
        errno.ELOOP: "symlink",
        errno.EXDEV: "missing",  # on a mount: not of this root
    }
    return Refused(why[error.errno], path) if error.errno in why else error


def _is_directory(dir_fd: int, name: bytes) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    return False


def _exists(dir_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove(dir_fd: int, name: bytes) -> None:
    """With what is in it; nothing if there is none."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=dir_fd)


def _finish(source: int, target: int, found: os.stat_result) -> None:
    """Attributes after the owner, whose change clears setuid and capabilities; times last."""
    os.fchown(target, found.st_uid, found.st_gid)
    os.fchmod(target, stat.S_IMODE(found.st_mode))
    for key in os.listxattr(target):
        if key.startswith(_ATTRIBUTES):
            os.removexattr(target, key)
    for key in os.listxattr(source):
        if key.startswith(_ATTRIBUTES):
            os.setxattr(target, key, os.getxattr(source, key))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _times(dir_fd: int, name: bytes, found: os.stat_result) -> None:
    times = (found.st_atime_ns, found.st_mtime_ns)
    os.utime(name, ns=times, dir_fd=dir_fd, follow_symlinks=False)
