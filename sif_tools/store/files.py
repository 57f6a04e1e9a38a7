"""Files on a shared file system: published whole or not at all, and read although it is shared.

Nothing here relies on a lock, on this host's clock or on a cache being coherent: see the package's
docstring for the order of things and why.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from sif_tools.errors import StoreDamaged, StoreFull, StoreWriteFailed
from sif_tools.store.steps import OnStep, Step, ignore

_COPY_BYTES: Final = 8 << 20
_READ_BYTES: Final = 1 << 20
MAX_RECORD_BYTES: Final = 4 << 20
_REOPENINGS: Final = 3
TEMPORARY: Final = ".tmp"


def publish_file(
    source_fd: int, size_bytes: int, digest: str, target: Path, on_step: OnStep = ignore
) -> bool:
    """Publish the open file, whose SHA-256 is `digest`; False where it was there already.

    Raises StoreFull, StoreWriteFailed, or StoreDamaged where what is there is something else.
    """
    with _failures(target):
        if _is_published(target, size_bytes):
            return False
        make_parents(target)

        def fill(fd: int) -> None:
            _copy(source_fd, fd, size_bytes, on_step)

        return _publish(target, size_bytes, digest, fill, on_step)


def publish_json(target: Path, node: Any, *, replace: bool = False) -> bool:
    """Publish a record; False where there was one, which then stays unless `replace`."""
    data = (json.dumps(node, sort_keys=True, indent=1) + "\n").encode()
    with _failures(target):
        make_parents(target)

        def fill(fd: int) -> None:
            _write(fd, data)

        digest = hashlib.sha256(data).hexdigest()
        return _publish(target, None, digest, fill, ignore, replace=replace)


def _publish(
    target: Path,
    size_bytes: int | None,
    digest: str,
    fill: Callable[[int], None],
    on_step: OnStep,
    *,
    replace: bool = False,
) -> bool:
    temporary = target.with_name(f".{target.name[:120]}.{secrets.token_hex(8)}{TEMPORARY}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            fill(fd)
            on_step(Step.COPIED)
            # Readable by all: a node reads as whoever it is there.
            os.fchmod(fd, 0o444)
            os.fsync(fd)
            identity = os.fstat(fd)
        finally:
            os.close(fd)
        on_step(Step.SYNCED)
        if file_digest(temporary) != digest:
            raise StoreDamaged(f"{temporary}: read back, it is not what was written")
        on_step(Step.VERIFIED)
        if replace:
            os.replace(temporary, target)
            made = True
        else:
            made = _link(temporary, target, identity, size_bytes)
        on_step(Step.LINKED)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    sync_directory(target.parent)
    on_step(Step.PUBLISHED)
    return made


def _link(temporary: Path, target: Path, identity: os.stat_result, size_bytes: int | None) -> bool:
    try:
        os.link(temporary, target)
    except OSError as error:
        # A request that was repeated after a lost answer fails although it was carried out.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(target), identity):
                return True
        if error.errno != errno.EEXIST:
            raise
        if size_bytes is not None and not _is_published(target, size_bytes):
            raise StoreWriteFailed(f"{target} came and went") from error
        return False
    return True


def _is_published(target: Path, size_bytes: int) -> bool:
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return False
    if status.st_size != size_bytes:
        raise StoreDamaged(
            f"{target} has {status.st_size} bytes, not {size_bytes}",
            hint="sif-tools verify finds what else is; remove the file to have it made anew",
        )
    return True


def _copy(source_fd: int, target_fd: int, size_bytes: int, on_step: OnStep) -> None:
    done = 0
    while done < size_bytes:
        # In halves at least, so that a test can stop in the middle of any file.
        step = min(_COPY_BYTES, max(size_bytes // 2, 1), size_bytes - done)
        data = os.pread(source_fd, step, done)
        if not data:
            raise StoreWriteFailed("the local copy of the file became shorter")
        _write(target_fd, data)
        if done == 0:
            on_step(Step.COPY_BEGUN)
        done += len(data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def file_digest(path: Path) -> str:
    """SHA-256 of a file as the file system has it: what this host caches of it is dropped first."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        while data := os.read(fd, _READ_BYTES):
            digest.update(data)
    finally:
        os.close(fd)
    return digest.hexdigest()


def make_parents(target: Path) -> None:
    """The directories above a file, each synced into the one above it when it is made."""
    try:
        os.stat(target.parent)
    except FileNotFoundError:
        make_parents(target.parent)
        with suppress(FileExistsError):
            os.mkdir(target.parent, 0o755)
            sync_directory(target.parent.parent)


def sync_directory(path: Path) -> None:
    """Make the names in it last. Some file systems cannot, and need not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def open_published(path: Path) -> int:
    """Open a published file for reading. OSError as it comes, but not for a stale handle: that is
    a name this host knows from before it was replaced on the server, so it is looked up again."""
    for attempt in range(_REOPENINGS):
        try:
            # Non-blocking: nothing else than a file may hold us.
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ESTALE or attempt + 1 == _REOPENINGS:
                raise
    raise AssertionError("the loop returns or raises")


def read_json(path: Path) -> Any:
    """A record; None where there is none. Raises StoreDamaged and OSError."""
    for attempt in range(_REOPENINGS):
        try:
            fd = open_published(path)
            try:
                data = os.read(fd, MAX_RECORD_BYTES + 1)
            finally:
                os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ESTALE and attempt + 1 < _REOPENINGS:
                continue
            raise
        break
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{path} is not JSON: {error}") from error


def server_time(directory: Path) -> float:
    """What the clock that stamps files there says now."""
    path = directory / f".clock.{secrets.token_hex(8)}{TEMPORARY}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Without a time given, the server takes its own.
        os.utime(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            path.unlink()


@contextmanager
def _failures(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"{target.parent}: {error.strerror}", hint="sif-tools gc may free some"
            ) from error
        raise StoreWriteFailed(f"{target}: {error.strerror}") from error
