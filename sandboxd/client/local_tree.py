"""A directory of ours as a tar stream, and a tar stream of a sandbox's into a directory of ours.

What comes from a sandbox is untrusted: it was written by a policy, and read by a trainer that has
more rights. So nothing is followed that is not below the target, links that lead out of it are left
out, and neither owners nor set-id bits are taken over.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

CHUNK_BYTES: Final = 256 * 1024
_BLOCK: Final = 512
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Unpacked:
    """What became of a tar. ``skipped``: devices, and links that lead out of the directory."""

    members: int = 0
    size_bytes: int = 0
    skipped: list[str] = field(default_factory=list)


# --- out -------------------------------------------------------------------------------------


def pack(directory: str | os.PathLike[str]) -> Iterator[bytes]:
    """The content of a directory as a tar, in pieces of some hundred KiB, at constant memory.

    Sockets and devices are left out; owners are for the other side to say. Raises OSError, also for
    a file that changes its size while it is read.
    """
    gathered = bytearray()
    for piece in _members(os.fspath(directory)):
        gathered += piece
        if len(gathered) >= CHUNK_BYTES:
            yield bytes(gathered)
            gathered.clear()
    yield bytes(gathered) + bytes(2 * _BLOCK)


def _members(root: str) -> Iterator[bytes]:
    for parent, directories, files in os.walk(root, onerror=_raise):
        directories.sort()
        for name in sorted([*directories, *files]):
            path = os.path.join(parent, name)
            yield from _member(path, os.path.relpath(path, root))


def _raise(error: OSError) -> None:
    raise error


def _member(path: str, name: str) -> Iterator[bytes]:
    status = os.lstat(path)
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    if stat.S_ISREG(status.st_mode):
        info.size = status.st_size
        yield _header(info)
        yield from _content(path, status.st_size)
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        yield _header(info)
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        yield _header(info)
    elif stat.S_ISFIFO(status.st_mode):
        info.type = tarfile.FIFOTYPE
        yield _header(info)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(path: str, size: int) -> Iterator[bytes]:
    left = size
    with open(path, "rb", buffering=0) as file:
        while left:
            data = file.read(min(left, CHUNK_BYTES))
            if not data:
                raise OSError(f"{path} became shorter while it was read")
            left -= len(data)
            yield data
    yield bytes(-size % _BLOCK)


# --- in --------------------------------------------------------------------------------------


class PieceFile(io.RawIOBase):
    """Pieces as they come, as a file that tarfile can read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def unpack(stream: io.RawIOBase | BinaryIO, directory: str | os.PathLike[str]) -> Unpacked:
    """Put a tar's content into a directory, which is made if it is missing. Files replace files.

    Raises OSError, and ValueError for what is no whole tar or has a name that leads out of it.
    """
    os.makedirs(directory, exist_ok=True)
    done = Unpacked()
    modes: list[tuple[str, int]] = []
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with tarfile.open(
            fileobj=stream,
            mode="r|",
            bufsize=CHUNK_BYTES,
            errors="surrogateescape",
        ) as tar:
            for info in tar:
                _put(tar, info, root, done, modes)
        for name, mode in reversed(modes):  # last: a directory may be one that cannot be written
            with _opened(root, _parts(name)) as fd:
                os.fchmod(fd, mode)
    except tarfile.TarError as error:
        raise ValueError(f"no whole tar: {error}") from error
    finally:
        os.close(root)
    return done


def _put(
    tar: tarfile.TarFile,
    info: tarfile.TarInfo,
    root: int,
    done: Unpacked,
    modes: list[tuple[str, int]],
) -> None:
    parts = _parts(info.name)
    if not parts:
        return
    if info.isdir():
        with _opened(root, parts):
            modes.append((info.name, info.mode & 0o777 | stat.S_IRWXU))
    elif info.isreg():
        with _opened(root, parts[:-1]) as parent:
            done.size_bytes += _put_file(tar, info, parent, parts[-1])
    elif info.issym() and _stays_inside(parts[:-1], info.linkname):
        with _opened(root, parts[:-1]) as parent:
            _make_room(parent, parts[-1])
            os.symlink(info.linkname, parts[-1], dir_fd=parent)
    elif info.islnk():
        source = _parts(info.linkname)
        with _opened(root, source[:-1]) as there, _opened(root, parts[:-1]) as parent:
            _make_room(parent, parts[-1])
            os.link(
                source[-1],
                parts[-1],
                src_dir_fd=there,
                dst_dir_fd=parent,
                follow_symlinks=False,
            )
    else:
        done.skipped.append(info.name)
        return
    done.members += 1


def _put_file(tar: tarfile.TarFile, info: tarfile.TarInfo, parent: int, name: str) -> int:
    _make_room(parent, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, info.mode & 0o777, dir_fd=parent)
    with open(fd, "wb", buffering=0) as file:
        source = tar.extractfile(info)
        assert source is not None
        while data := source.read(CHUNK_BYTES):
            file.write(data)
        os.utime(fd, (info.mtime, info.mtime))
        return file.tell()


def _parts(name: str) -> list[str]:
    if name.startswith("/"):
        raise ValueError(f"an absolute name in the tar: {name!r}")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"a name in the tar that leads out of it: {name!r}")
    return parts


def _stays_inside(parent: list[str], target: str) -> bool:
    """Whether a link's text, taken without following others, stays below the root."""
    if target.startswith("/"):
        return False
    depth = len(parent)
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return False
    return True


@contextlib.contextmanager
def _opened(root: int, parts: list[str]) -> Iterator[int]:
    """A directory below ``root``, made where it is missing; never through a symlink."""
    fd = os.dup(root)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=fd)
            below = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def _make_room(parent: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
