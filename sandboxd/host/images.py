"""Images that the kernel itself serves: squashfs on a loop device, mounted by the host's root.

The kernel trusts a file system's bytes, which squashfuse, without any right, need not: so they must
be known bytes, and stay them. A file is taken whose SHA-256 is the digest that the store has it by,
that root owns, that nobody else may write to, that nobody has open for writing (a lease would not
be given), that lies on a file system of this machine, and there below the images' directory: a
daemon or a launcher that was taken over cannot name another file of root's. Nor another part of
that file: its name is its digest, as a store has it, and the file system begins where the SIF's own
table has a partition. A task image may hold any bytes, and those of a file in it that does not
compress lie in the SIF as they are, a file system made to break the kernel among them.

What was looked at once is known by its inode and its times of change.

A digest takes a second for a gigabyte, and a disk may never answer: a child does each.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from sandboxd.host.children import Children
from sandboxd.launcher import protocol
from sandboxd.linux import file_system, namespaces, squashfs

CHILDREN_MAX: Final = 32
KNOWN_MAX: Final = 4096
NOT_TRUSTED: Final = errno.EPERM
"""The errno that says so, and no other failure."""

_HEADER: Final = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR: Final = struct.Struct("<iB3Iq560x")
"""Of a SIF, as far as is asked for here: hostd imports no parser of images."""
_PARTITION: Final = 0x4004
_DESCRIPTORS_MAX: Final = 4096

Identity = tuple[int, ...]


class KernelImages:
    """The children that mount images, and which files were found to be what they should be."""

    def __init__(self, images_dir: str) -> None:
        self._images_dir = images_dir
        self._children: Children[tuple[Identity, str]] = Children(CHILDREN_MAX)
        self._known: dict[Identity, str] = {}

    @property
    def pidfds(self) -> list[int]:
        """Readable once one has ended; then it is for ``ended``."""
        return self._children.pidfds

    def mount(
        self, sock: socket.socket, message: Mapping[str, Any], file_fd: int, launcher_pid: int
    ) -> None:
        """Have a launcher's ``image`` answered: with the mount's descriptor, or an errno."""
        if self._children.is_full:
            told = {"errno": errno.EAGAIN, "what": "too many are mounted already"}
            protocol.send(sock, {"id": message["id"], **told})
            return
        digest = str(message["digest"])
        identity = _identity(os.fstat(file_fd))
        known = self._known.get(identity) == digest
        user_ns = namespaces.open_namespace(launcher_pid, "user")
        if not self._children.fork((identity, digest)):
            os.close(user_ns)
            return
        verified = False
        try:
            fds: tuple[int, ...] = ()
            try:
                check_file(file_fd, self._images_dir, digest)
                if not known:
                    check_digest(file_fd, digest)
                verified = True
                offset = int(message["offset_bytes"])
                check_offset(file_fd, offset)
                fds = (squashfs.mount_idmapped(file_fd, offset, user_ns),)
                answer = {"id": message["id"]}
            except OSError as error:
                answer = {
                    "id": message["id"],
                    "errno": error.errno or errno.EIO,
                    "what": str(error),
                }
                if error.errno == NOT_TRUSTED:
                    answer["what"] = error.strerror
            protocol.send(sock, answer, fds)
        finally:
            os._exit(0 if verified else 1)

    def ended(self, pidfd: int) -> None:
        (identity, digest), status = self._children.ended(pidfd)
        if status == 0:
            self._known[identity] = digest
            while len(self._known) > KNOWN_MAX:
                del self._known[next(iter(self._known))]

    def stop(self) -> None:
        """End them all. Idempotent."""
        self._children.stop()


def check_file(fd: int, images_dir: str, digest: str) -> None:
    """Whether a file lies below ``images_dir``, by its digest, and only root can change it. Raises
    OSError, NOT_TRUSTED with the reason."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(NOT_TRUSTED, "it is not a regular file")
    # Where it was opened; what links lead to elsewhere lies elsewhere.
    path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
    if not path.startswith(os.path.realpath(images_dir) + "/"):
        raise OSError(NOT_TRUSTED, "it does not lie in the images' directory")
    if status.st_uid != 0:
        raise OSError(NOT_TRUSTED, f"it is owned by uid {status.st_uid}, not by root")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(NOT_TRUSTED, f"its mode is {stat.S_IMODE(status.st_mode):04o}")
    if file_system.magic(fd) not in file_system.LOCAL:
        raise OSError(NOT_TRUSTED, "it lies on a file system that others may change")
    if os.path.basename(path) != f"{digest}.sif":
        raise OSError(NOT_TRUSTED, "its name is not its digest, as a store has it")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise OSError(NOT_TRUSTED, "it is open for writing")
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        why = "it is open for writing" if error.errno == errno.EAGAIN else str(error)
        raise OSError(NOT_TRUSTED, why) from None
    # Not kept: whoever opens it for writing later is root.
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def check_digest(fd: int, digest: str) -> None:
    """Whether a file's SHA-256 is ``digest``, in hexadecimal. Raises OSError, NOT_TRUSTED."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise OSError(NOT_TRUSTED, f"its SHA-256 is {found[:12]}…, not {digest[:12]}…")


def check_offset(fd: int, offset_bytes: int) -> None:
    """Whether a partition of this SIF begins there. Raises OSError, NOT_TRUSTED."""
    with suppress(struct.error, ValueError, OverflowError):
        _, magic, *_, total, at, _, _, _ = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        if magic == b"SIF_MAGIC\0" and 0 <= total <= _DESCRIPTORS_MAX and at >= 0:
            table = os.pread(fd, total * _DESCRIPTOR.size, at)
            for kind, used, _, _, _, begins in _DESCRIPTOR.iter_unpack(table):
                if kind == _PARTITION and used and begins == offset_bytes:
                    return
    raise OSError(NOT_TRUSTED, "none of its partitions begins there")


def _identity(status: os.stat_result) -> Identity:
    return (
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
    )  # fmt: skip
