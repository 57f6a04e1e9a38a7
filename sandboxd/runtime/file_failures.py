"""What a failed file operation means: the error for a step and errno of ``protocol.h``.

Never the node's: all of it happens in the sandbox, to what its programs made. What is not named
here is ``file-error`` with the errno.
"""

from __future__ import annotations

import errno
from typing import Final

from sandboxd.errors import (
    ArchiveInvalid,
    CrossDevice,
    DirectoryNotEmpty,
    DiskFull,
    FileAccessDenied,
    FileBusy,
    FileChanged,
    FileError,
    FileExists,
    FileNotFound,
    NotADirectory,
    NotARegularFile,
    RequestError,
    SandboxdError,
    TreeTooLarge,
    UserNotFound,
    UserNotMapped,
)
from sandboxd.init.protocol import ArchiveFlaw, Failure, Step, errno_symbol, step_slug
from sandboxd.runtime.failures import NO_ROOM, exec_failure, words

_BY_ERRNO: Final[dict[int, type[FileError]]] = {
    errno.ENOENT: FileNotFound,
    errno.ENOTDIR: FileNotFound,
    errno.EACCES: FileAccessDenied,
    errno.EPERM: FileAccessDenied,
    errno.EROFS: FileAccessDenied,
    errno.EISDIR: NotARegularFile,
    errno.ENXIO: NotARegularFile,
    errno.ENODEV: NotARegularFile,
    errno.ENOTEMPTY: DirectoryNotEmpty,
    errno.EEXIST: FileExists,
    errno.EXDEV: CrossDevice,
    errno.EBUSY: FileBusy,
    errno.ETXTBSY: FileBusy,
}
_STEPS: Final = frozenset(
    {
        Step.STEP_FILE_OPEN,
        Step.STEP_FILE_READ,
        Step.STEP_FILE_WRITE,
        Step.STEP_FILE_RENAME,
        Step.STEP_FILE_TREE,
    }
)
_DESTINATION: Final = 4
"""Index of STEP_FILE_OPEN for where something is moved to."""
_HINTS: Final[dict[type[FileError], str]] = {
    CrossDevice: "run mv in the sandbox: it copies what cannot be renamed",
    DirectoryNotEmpty: "ask with recursive=true",
}
_BOUNDS: Final = {0: "entries", 1: "bytes", 2: "levels"}
_FLAWS: Final = {
    ArchiveFlaw.ARCHIVE_TRUNCATED: "the archive ends before its end",
    ArchiveFlaw.ARCHIVE_HEADER: "no tar archive, or a damaged one: a header's checksum is wrong",
    ArchiveFlaw.ARCHIVE_NUMBER: "a number in a header is none, or cannot be",
    ArchiveFlaw.ARCHIVE_NAME: "a name is absolute, has '..', is empty, too long or too deep",
    ArchiveFlaw.ARCHIVE_LINK: "a member is beneath a symlink, or a hard link leads to nothing",
    ArchiveFlaw.ARCHIVE_EXTENSION: "an extended header is damaged or not one that is known",
    ArchiveFlaw.ARCHIVE_TYPE: "a member is a device, a sparse file or of an unknown type",
    ArchiveFlaw.ARCHIVE_ENTRIES: "it has too many members",
    ArchiveFlaw.ARCHIVE_SIZE: "its files have too many bytes",
    ArchiveFlaw.ARCHIVE_IN_THE_WAY: "a directory is where a file is to go, or the other way round",
}


def file_failure(
    failure: Failure, *, user: str, path: str, other: str = "", place: str | None = None
) -> SandboxdError:
    """The error for a file operation that did not succeed. ``place``: what below ``path`` it was
    at; ``other``: a move's destination or a new owner."""
    step, err, index = failure.step, failure.err, failure.index
    detail = {"step": step_slug(step), "errno": errno_symbol(err)}
    where = path
    if step == Step.STEP_FILE_OPEN and index == _DESTINATION:
        where = other
    elif place:
        where = f"{path.rstrip('/')}/{place}"
    detail["path"] = where
    if step == Step.STEP_ARCHIVE:
        return _archive_invalid(index, place)
    if err in NO_ROOM:
        return DiskFull("the sandbox's writable layer is full", **detail)
    if step == Step.STEP_FILE_TYPE:
        if err == errno.ENOTDIR:
            return NotADirectory(f"{where!r} is not a directory", **detail)
        return NotARegularFile(f"{where!r} is not a regular file", **detail)
    if step == Step.STEP_FILE_LENGTH:
        return RequestError("the body was shorter than it said", **detail)
    if step == Step.STEP_FILE_BOUND:
        bound = _BOUNDS.get(index, "of something")
        return TreeTooLarge(f"{where!r}: too many {bound}", bound=bound, **detail)
    if step == Step.STEP_FILE_CHANGED:
        return FileChanged(f"{where!r} was changed meanwhile", **detail)
    if step in (Step.STEP_USER, Step.STEP_GROUP) and index == 1:
        return UserNotFound(f"no user {other!r} in the sandbox: {words(err)}", user=other, **detail)
    if step == Step.STEP_FILE_RENAME and err in (errno.EISDIR, errno.ENOTDIR):
        return FileExists(f"{other or where!r}: {words(err)}", **detail)
    if step == Step.STEP_FILE_TREE and err == errno.EINVAL and other:
        return UserNotMapped(
            f"owner {other!r}: this node has no such id for its sandboxes", user=other, **detail
        )
    if step in _STEPS:
        kind = _BY_ERRNO.get(err, FileError)
        return kind(f"{where!r}: {words(err)}", hint=_HINTS.get(kind), **detail)
    return exec_failure(failure, user=user, cwd="/")


def _archive_invalid(index: int, member: str | None) -> ArchiveInvalid:
    try:
        flaw = ArchiveFlaw(index)
    except ValueError:
        return ArchiveInvalid("the archive is invalid", reason=str(index), member=member)
    at = f" (at {member!r})" if member else ""
    return ArchiveInvalid(f"{_FLAWS[flaw]}{at}", reason=flaw.slug, member=member)
