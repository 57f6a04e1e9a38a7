"""What a mount of the host's is put over, made in a root before anything runs in it.

Of a new sandbox the root is the image's, of a rollback and a fork what a sandbox has made of it: no
symlink is followed, no mount crossed, and what is there already stays as it is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from sandboxd.linux.openat2 import openat2

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY


def make_targets(root_fd: int, places: Iterable[Mapping[str, Any]]) -> None:
    """Make each ``path`` (relative, normal) a directory or an empty file that belongs to root.

    Raises OSError with the path as its file name: ELOOP for a symlink, ENOTDIR or EISDIR for
    something else that is in the way.
    """
    for place in places:
        try:
            _make(root_fd, place["path"], directory=place["directory"])
        except OSError as error:
            raise OSError(error.errno, error.strerror, "/" + place["path"]) from error


def _make(root_fd: int, path: str, *, directory: bool) -> None:
    *above, last = path.split("/")
    at = os.dup(root_fd)
    try:
        for name in above:
            at = _enter(at, name)
        if directory:
            at = _enter(at, last)
            return
        create = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(FileExistsError):
            fd = os.open(last, create, 0o644, dir_fd=at)
            try:
                os.fchown(fd, 0, 0)
            finally:
                os.close(fd)
        kind = os.stat(last, dir_fd=at, follow_symlinks=False).st_mode
        if stat.S_ISLNK(kind):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    finally:
        os.close(at)


def _enter(at: int, name: str) -> int:
    """The directory ``name`` in ``at``, which is closed where this succeeds."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=at)
        os.chown(name, 0, 0, dir_fd=at, follow_symlinks=False)
    below = openat2(at, os.fsencode(name), _DIRECTORY)
    os.close(at)
    return below
