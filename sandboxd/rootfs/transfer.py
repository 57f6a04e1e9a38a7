"""Files of one sandbox's root, put into another's that nothing runs in yet.

Runs in a worker that may read and write all of both roots, so nothing of the source decides where:
every name is opened below the directory that it is in, no symlink and no mount on the way
(``linux.openat2``), and the source's processes are frozen meanwhile. At each path the target then
has what the source has, and nothing else: owners, modes, times, hard links, user attributes, ACLs
and file capabilities included.

Both roots stand on the same images. What the source has never written to is the same in both and is
passed over, so a copy costs what was written and not what there is.

Symlinks within a tree are copied as what they are. A named path that is one, or that leads over
one, is refused. Sockets, devices and mounts are left out.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

from sandboxd.linux.openat2 import openat2
from sandboxd.rootfs.copy import copy_content

DEPTH_MAX: Final = 256
"""Levels of directories. Each takes three descriptors and one for each layer while one is in it."""
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


@dataclass(frozen=True, slots=True)
class _Place:
    """The same directory in both roots, open."""

    source: int
    target: int
    layers: tuple[int, ...]
    """And in those layers of the source that have it."""
    fresh: bool
    """Made by this copy: nothing is in the way there."""


_Step = tuple[_Place, bytes, bytes, os.stat_result]
"""An entry: where, its name and path, and what it is."""


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
    """Sockets, devices and mounts."""
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
            layers = _below(self.layers, above) if above else list(map(os.dup, self.layers))
            for layer in layers:
                undo.callback(os.close, layer)
            if name not in _names(layers):
                return
            target = self._make_parents(above)
            undo.callback(os.close, target)
            at = _Place(source, target, tuple(layers), fresh=False)
            self._copy_entry(at, name, path, found)

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

    # --- one entry ---------------------------------------------------------------------------

    def _copy_entry(self, at: _Place, name: bytes, path: bytes, found: os.stat_result) -> None:
        """What is called ``name`` in two open directories, and all that is below it."""
        step: _Step | None = (at, name, path, found)
        walk: list[Generator[_Step, None, None]] = []
        try:
            while True:
                if step is not None and not stat.S_ISDIR(step[3].st_mode):
                    self._copy_file(*step)
                elif step is not None:
                    if len(walk) == DEPTH_MAX:
                        raise Refused("too-deep", step[2][:_PATH_MAX])
                    walk.append(self._directory(*step))
                else:
                    walk.pop()
                if not walk:
                    return
                step = next(walk[-1], None)
                if step is not None and len(step[2]) > _PATH_MAX:
                    raise Refused("too-deep", step[2][:_PATH_MAX])
        finally:
            for one in walk:
                one.close()

    def _directory(
        self, at: _Place, name: bytes, path: bytes, found: os.stat_result
    ) -> Generator[_Step, None, None]:
        """Copy a directory; yields what is below it, before it is done."""
        with ExitStack() as undo:
            try:
                below = openat2(at.source, name, _DIRECTORY)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self.left_out += 1
                return
            undo.callback(os.close, below)
            fresh = at.fresh or not _is_directory(at.target, name)
            if fresh:
                if not at.fresh:
                    _remove(at.target, name)
                os.mkdir(name, 0o700, dir_fd=at.target)
            self.entries += 1
            into = openat2(at.target, name, _DIRECTORY)
            undo.callback(os.close, into)
            layers = tuple(_below(at.layers, name))
            for layer in layers:
                undo.callback(os.close, layer)
            with os.scandir(below) as entries:
                listed = {os.fsencode(entry.name): entry for entry in entries}
                if not fresh:
                    for extra in map(os.fsencode, os.listdir(into)):
                        if extra not in listed:
                            _remove(into, extra)
                place = _Place(below, into, layers, fresh)
                for child in _names(layers) & listed.keys():
                    status = listed[child].stat(follow_symlinks=False)
                    yield place, child, path + b"/" + child, status
            _finish(below, into, found, clear=not at.fresh)

    def _copy_file(self, at: _Place, name: bytes, path: bytes, found: os.stat_result) -> None:
        mode, inode = found.st_mode, (found.st_dev, found.st_ino)
        if not at.fresh:
            _remove(at.target, name)
        if stat.S_ISSOCK(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            self.left_out += 1
            return
        if found.st_nlink > 1 and inode in self._links:
            self.entries += 1
            os.link(
                self._links[inode],
                name,
                src_dir_fd=self.target,
                dst_dir_fd=at.target,
                follow_symlinks=False,
            )
            return
        if stat.S_ISREG(mode):
            if not self._copy_regular(at, name):
                return
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=at.source), name, dir_fd=at.target)
            os.chown(name, found.st_uid, found.st_gid, dir_fd=at.target, follow_symlinks=False)
            _times(at.target, name, found)
        else:
            os.mkfifo(name, 0o600, dir_fd=at.target)
            os.chown(name, found.st_uid, found.st_gid, dir_fd=at.target, follow_symlinks=False)
            os.chmod(name, stat.S_IMODE(mode), dir_fd=at.target)
            _times(at.target, name, found)
        self.entries += 1
        if found.st_nlink > 1:
            self._links[inode] = path

    def _copy_regular(self, at: _Place, name: bytes) -> bool:
        """False for what is a mount: no file of this root."""
        try:
            reading = openat2(at.source, name, _FILE)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self.left_out += 1
            return False
        try:
            found = os.fstat(reading)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "copy")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            writing = os.open(name, flags, 0o600, dir_fd=at.target)
            try:
                copy_content(reading, writing, found)
                _finish(reading, writing, found, clear=not at.fresh)
            finally:
                os.close(writing)
        finally:
            os.close(reading)
        self.copied_bytes += found.st_size
        return True


def _names(directories: Sequence[int]) -> set[bytes]:
    return {os.fsencode(name) for one in directories for name in os.listdir(one)}


def _below(layers: Sequence[int], path: bytes) -> list[int]:
    """The directory ``path`` of each layer that has it, open."""
    found = []
    for layer in layers:
        with suppress(OSError):
            found.append(openat2(layer, path, _DIRECTORY))
    return found


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


def _remove(dir_fd: int, name: bytes) -> None:
    """With what is in it; nothing if there is none."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=dir_fd)


def _finish(source: int, target: int, found: os.stat_result, *, clear: bool) -> None:
    """Attributes after the owner, whose change clears setuid and capabilities; times last.

    ``clear``: the target may have some of its own, or of its directory's default ACL.
    """
    os.fchown(target, found.st_uid, found.st_gid)
    os.fchmod(target, stat.S_IMODE(found.st_mode))
    for key in os.listxattr(target) if clear else ():
        if key.startswith(_ATTRIBUTES):
            os.removexattr(target, key)
    for key in os.listxattr(source):
        if key.startswith(_ATTRIBUTES):
            os.setxattr(target, key, os.getxattr(source, key))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _times(dir_fd: int, name: bytes, found: os.stat_result) -> None:
    times = (found.st_atime_ns, found.st_mtime_ns)
    os.utime(name, ns=times, dir_fd=dir_fd, follow_symlinks=False)
