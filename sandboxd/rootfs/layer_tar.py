"""Changes of a root as a tar in the form of an OCI image layer.

What is gone is an empty file ``.wh.NAME``; a directory in the place of something else, and
everything in it, is told whole after the whiteout of what was there. Directories on the way to a
change are in it, with their attributes, as a layer's must be. Hard links are links; times are those
of the files. Sockets are left out: without the process behind them they are nothing.

https://github.com/opencontainers/image-spec/blob/main/layer.md
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Iterable, Sequence
from typing import IO, Final

from sandboxd.linux.openat2 import openat2
from sandboxd.rootfs.compare import Change

WHITEOUT: Final = b".wh."

_TYPES: Final = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def unspeakable(changes: Iterable[Change]) -> bytes | None:
    """The first path that a layer cannot have: one whose name is spelled as a whiteout, or with an
    attribute whose name ends where a pax record has it end."""
    for change in changes:
        if change.how == "removed":
            continue
        if change.path.rpartition(b"/")[2].startswith(WHITEOUT):
            return change.path
        if any("=" in key for key in change.attributes or ()):
            return change.path
    return None


def content_bytes(changes: Iterable[Change]) -> int:
    """Of all files, holes included."""
    return sum(one.status.st_size for one in changes if stat.S_ISREG(one.status.st_mode))


def write_layer(root: int, changes: Sequence[Change], out: IO[bytes]) -> None:
    """Write the tar of ``changes``, whose newer root is the open directory ``root``, in their
    order. Raises OSError; ESTALE for a file that is not what it was, or shrinks meanwhile."""
    told: set[bytes] = set()
    links: dict[tuple[int, int], str] = {}
    with tarfile.open(
        fileobj=out,
        mode="w|",
        format=tarfile.PAX_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as tar:
        for change in changes:
            _write_parents(tar, root, change.path, told)
            if change.how == "removed" or "type" in change.what:
                above, slash, name = change.path.rpartition(b"/")
                gone = tarfile.TarInfo(os.fsdecode(above + slash + WHITEOUT + name))
                _add(tar, gone)
            if change.how != "removed":
                _write(tar, root, change, links)
                told.add(change.path)


def _write_parents(tar: tarfile.TarFile, root: int, path: bytes, told: set[bytes]) -> None:
    """The directories that lead to ``path``, unless they are in the tar already."""
    missing = []
    above = path
    while above:
        above = above.rpartition(b"/")[0]
        if above in told:
            break
        missing.append(above)
    for one in reversed(missing):
        told.add(one)
        fd = openat2(root, one or b".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            _add(tar, _header(Change(one, "changed", (), os.fstat(fd), None, _xattrs(fd))))
        finally:
            os.close(fd)


def _xattrs(fd: int) -> dict[str, bytes]:
    kept = ("user.", "security.capability", "system.posix_acl_")
    return {key: os.getxattr(fd, key) for key in os.listxattr(fd) if key.startswith(kept)}


def _write(
    tar: tarfile.TarFile, root: int, change: Change, links: dict[tuple[int, int], str]
) -> None:
    found = change.status
    if stat.S_ISSOCK(found.st_mode):
        return
    header = _header(change)
    if change.inode is not None:
        first = links.setdefault(change.inode, header.name)
        if first != header.name:
            header.type, header.linkname, header.size = tarfile.LNKTYPE, first, 0
            header.pax_headers = {}
            _add(tar, header)
            return
    if not stat.S_ISREG(found.st_mode):
        _add(tar, header)
        return
    fd = openat2(root, change.path, _FILE)
    with os.fdopen(fd, "rb", buffering=0) as file:
        now = os.fstat(fd)
        if not stat.S_ISREG(now.st_mode) or now.st_size < found.st_size:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "diff")
        try:
            _add(tar, header, file)
        except OSError as error:
            if error.errno is None:  # tarfile's own: the file ended early
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "diff") from error
            raise


def _add(tar: tarfile.TarFile, header: tarfile.TarInfo, file: IO[bytes] | None = None) -> None:
    tar.addfile(header, file)
    tar.members.clear()  # type: ignore[attr-defined]  # it would remember all of them


def _header(change: Change) -> tarfile.TarInfo:
    found = change.status
    header = tarfile.TarInfo(os.fsdecode(change.path or b"./"))
    pax: dict[str, str] = {}
    header.pax_headers = pax
    header.type = _TYPES[stat.S_IFMT(found.st_mode)]
    header.mode = stat.S_IMODE(found.st_mode)
    header.uid, header.gid = found.st_uid, found.st_gid
    seconds, nanoseconds = divmod(found.st_mtime_ns, 1_000_000_000)
    header.mtime = seconds
    if nanoseconds or seconds < 0:
        sign = "-" if found.st_mtime_ns < 0 else ""
        seconds, nanoseconds = divmod(abs(found.st_mtime_ns), 1_000_000_000)
        pax["mtime"] = f"{sign}{seconds}.{nanoseconds:09d}"
    if stat.S_ISREG(found.st_mode):
        header.size = found.st_size
    elif stat.S_ISLNK(found.st_mode):
        header.linkname = os.fsdecode(change.target or b"")
    elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        header.devmajor, header.devminor = os.major(found.st_rdev), os.minor(found.st_rdev)
    for key, value in (change.attributes or {}).items():
        pax[f"SCHILY.xattr.{key}"] = os.fsdecode(value)
    return header
