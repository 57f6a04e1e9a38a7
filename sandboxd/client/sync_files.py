"""Files and directories of a sandbox, blocking: a part of ``Sandbox``."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Unpack

from sandboxd.client import file_calls, local_tree
from sandboxd.client.file_calls import FileEntry, FindOptions, Listing
from sandboxd.client.local_files import CHUNK_BYTES, replacing
from sandboxd.client.results import FileInfo
from sandboxd.client.sync_driver import Driver


class SandboxFiles(ABC):
    """What a sandbox does with files; ``user`` is who does it, the sandbox's own if left out."""

    _client: Driver

    @property
    @abstractmethod
    def id(self) -> str:
        """The sandbox's."""

    def read_file(
        self,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
    ) -> bytes:
        """From ``offset`` (below 0: from the end), ``length`` bytes at most. What has no size, as
        in ``/proc``, comes whole. Raises RangeNotSatisfiable for an offset past the end."""
        return self._client.do(file_calls.read(self.id, path, user, offset, length))

    def read_text(self, path: str, *, user: str | None = None) -> str:
        """Raises UnicodeDecodeError for what is no UTF-8."""
        return self.read_file(path, user=user).decode()

    def write_file(
        self,
        path: str,
        data: str | bytes,
        *,
        user: str | None = None,
        mode: int | None = None,
        owner: str | None = None,
        parents: bool = True,
    ) -> FileInfo:
        """Replace a file in one step: readers see the old or the new one."""
        raw = data.encode() if isinstance(data, str) else data
        return self._client.do(
            file_calls.write(
                self.id,
                path,
                raw,
                len(raw),
                user=user,
                mode=mode,
                owner=owner,
                parents=parents,
            )
        )

    def upload_file(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        user: str | None = None,
        mode: int | None = None,
        owner: str | None = None,
        parents: bool = True,
    ) -> FileInfo:
        """Copy a file of ours into the sandbox, at constant memory. Keeps its mode if none is
        given. Raises OSError for what concerns ours."""
        with open(source, "rb") as file:
            status = os.fstat(file.fileno())
            call = file_calls.write(
                self.id,
                path,
                None,
                status.st_size,
                user=user,
                mode=status.st_mode & 0o777 if mode is None else mode,
                owner=owner,
                parents=parents,
            )
            return self._client.upload(call, iter(lambda: file.read(CHUNK_BYTES), b""))

    def download_file(
        self, path: str, target: str | os.PathLike[str], *, user: str | None = None
    ) -> int:
        """Copy a file of the sandbox to ours, at constant memory; its size. What breaks off leaves
        nothing at ``target``."""
        with (
            self._client.stream(file_calls.read(self.id, path, user)) as pieces,
            replacing(target) as file,
        ):
            return sum(file.write(piece) for piece in pieces)

    def upload_dir(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        owner: str | None = None,
        parents: bool = True,
        user: str | None = None,
    ) -> int:
        """Put the content of a directory of ours into one of the sandbox, which is made if it is
        missing; how many names that were. Raises OSError for what concerns ours."""
        call = file_calls.unpack(
            self.id, path, include=include, exclude=exclude, owner=owner, parents=parents, user=user
        )
        return self._client.upload(call, local_tree.pack(source))

    def download_dir(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        skip_unreadable: bool = False,
        user: str | None = None,
    ) -> local_tree.Unpacked:
        """Put the content of a directory of the sandbox into one of ours. What leads out of it is
        left out (``local_tree``)."""
        call = file_calls.pack(
            self.id,
            path,
            include=include,
            exclude=exclude,
            skip_unreadable=skip_unreadable,
            user=user,
        )
        with self._client.stream(call) as pieces:
            return local_tree.unpack(local_tree.PieceFile(pieces), target)

    def stat(self, path: str, *, follow: bool = False, user: str | None = None) -> FileEntry:
        """Raises FileNotFound. A symlink itself, unless ``follow``."""
        return self._client.do(file_calls.stat(self.id, path, follow, user))

    def list_dir(
        self,
        path: str,
        *,
        recursive: bool = False,
        depth: int | None = None,
        limit: int = file_calls.LIST_MAX,
        user: str | None = None,
    ) -> Listing:
        return self._client.do(
            file_calls.list_dir(
                self.id, path, recursive=recursive, depth=depth, limit=limit, user=user
            )
        )

    def find(self, path: str, **wanted: Unpack[FindOptions]) -> Listing:
        """Entries below a directory, by pattern, type, size or time: ``find("/src", pattern="*.py",
        type="file")``."""
        return self._client.do(file_calls.find(self.id, path, wanted))

    def mkdir(
        self,
        path: str,
        *,
        mode: int | None = None,
        parents: bool = True,
        user: str | None = None,
    ) -> FileEntry:
        """Make a directory; with ``parents`` one that is there is done."""
        return self._client.do(file_calls.mkdir(self.id, path, mode, parents, user))

    def move(
        self,
        source: str,
        destination: str,
        *,
        overwrite: bool = False,
        parents: bool = True,
        user: str | None = None,
    ) -> FileEntry:
        """Rename; ``destination`` is the new name, never a directory to put it in."""
        return self._client.do(
            file_calls.move(
                self.id, source, destination, overwrite=overwrite, parents=parents, user=user
            )
        )

    def chmod(
        self, path: str, mode: int, *, recursive: bool = False, user: str | None = None
    ) -> int:
        """How many names were changed."""
        return self._client.do(file_calls.chmod(self.id, path, mode, recursive, user))

    def chown(
        self, path: str, owner: str, *, recursive: bool = False, user: str | None = None
    ) -> int:
        """``name`` or ``uid``, with ``:group``. How many names were changed."""
        return self._client.do(file_calls.chown(self.id, path, owner, recursive, user))

    def remove(
        self,
        path: str,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: str | None = None,
    ) -> int:
        """How many names are gone."""
        call = file_calls.remove(self.id, path, recursive, missing_ok, user)
        return self._client.do(call)
