"""Mounts of the host's files, as the launcher has them: asked of hostd, given to PID 1.

hostd opens and decides (``host/mounts.py``), each in a child of its own, since the file system of a
source may not answer. What comes is a mount that is attached nowhere; the mounter makes what it is
to cover, and PID 1 puts it there with the root and takes it along to every later one (``setup.c``).
A new PID 1, after a reset, is given new ones.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.errors import (
    DiskFull,
    MountNotAllowed,
    MountSourceInvalid,
    MountSourceNotFound,
    MountTargetInvalid,
    SandboxdError,
    SandboxSetupError,
)
from sandboxd.host.client import HostClient
from sandboxd.init.protocol import close_fds
from sandboxd.launcher.loop import Task

_SOURCE: Final[dict[int, type[SandboxdError]]] = {
    errno.EACCES: MountNotAllowed,
    errno.ENOENT: MountSourceNotFound,
    errno.ENOTDIR: MountSourceNotFound,
    errno.ENAMETOOLONG: MountSourceNotFound,
    errno.ELOOP: MountSourceInvalid,
    errno.EINVAL: MountSourceInvalid,
    errno.EXDEV: MountSourceInvalid,
}
_TARGET: Final = {
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EXDEV,
    errno.EEXIST,
    errno.ENAMETOOLONG,
}
"""What the mounter says where the root has something else at a target."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The mounts of one sandbox on their way to its PID 1."""

    fds: tuple[int, ...]
    targets: tuple[str, ...]
    """Relative to the root."""
    directories: tuple[bool, ...]
    mapped: tuple[bool, ...]

    def pairs(self) -> list[tuple[int, str]]:
        return list(zip(self.fds, self.targets, strict=True))

    def places(self) -> tuple[dict[str, Any], ...]:
        """What is to be in the root, for the mounter."""
        return tuple(
            {"path": path, "directory": directory}
            for path, directory in zip(self.targets, self.directories, strict=True)
        )

    def close(self) -> None:
        close_fds(self.fds)


def open_all(host: HostClient, asked: Sequence[dict[str, Any]]) -> Task[Opened]:
    """Have all of a sandbox's mounts made; they are the caller's to close.

    Raises MountNotAllowed, MountSourceNotFound, MountSourceInvalid, SandboxSetupError, with the
    ``source`` that it is about.
    """
    fds: list[int] = []
    kinds: list[tuple[bool, bool]] = []
    try:
        for one in asked:
            writable = not one["read_only"]
            try:
                fd, told = yield from host.mount(one["source"], writable=writable)
            except (OSError, TimeoutError) as error:
                raise _source_error(one["source"], error) from error
            fds.append(fd)
            kinds.append((bool(told.get("directory")), bool(told.get("mapped"))))
    except BaseException:
        close_fds(fds)
        raise
    targets = tuple(one["target"].lstrip("/") for one in asked)
    return Opened(tuple(fds), targets, tuple(k[0] for k in kinds), tuple(k[1] for k in kinds))


def _source_error(source: str, error: OSError | TimeoutError) -> SandboxdError:
    number = error.errno if isinstance(error, OSError) else None
    kind = _SOURCE.get(number or 0)
    if kind is not None:
        assert isinstance(error, OSError)
        return kind(f"mount source {source!r}: {(error.strerror or '').lower()}", source=source)
    return SandboxSetupError(f"mount source {source!r} does not answer: {error}", source=source)


def target_error(error: OSError) -> SandboxdError | None:
    """What a root is not fit for that has something else where a mount is to go."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull("the sandbox's inodes do not take the targets of its mounts")
    if error.errno not in _TARGET:
        return None
    target = error.filename if isinstance(error.filename, str) else ""
    return MountTargetInvalid(
        f"mount target {target!r} is a symlink or of another kind, or leads over one",
        target=target,
    )
