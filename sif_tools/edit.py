"""Change a SIF: add an object, delete one, choose the primary partition.

The file is copied (sharing blocks where the file system can), the copy changed and synced, and
then given the name: whoever has the old file open keeps it, and nobody sees half a change. What is
not changed keeps its bytes and its place, so that signatures of other groups stay valid. Not for
files in a store: those never change.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from sif_tools import format as sif_format
from sif_tools.copying import copy_range, pwrite
from sif_tools.errors import BadObject, NoSuchObject, WriteFailed
from sif_tools.format import PartType
from sif_tools.reader import opened, read_sif
from sif_tools.table import Row, Table, read_table
from sif_tools.writer import DataObject, FileContent

_COPY_STEP_BYTES: Final = 8 << 20
_ZEROS: Final = bytes(1 << 20)
_NAME_BYTES: Final = 128
_EXTRA_BYTES: Final = 384


def add_object(path: Path, item: DataObject) -> int:
    """Add an object after all others; returns its id. BadObject where there is no room for it."""
    with _edited(path) as edit:
        return edit.add(item)


def delete_object(path: Path, object_id: int) -> None:
    """Delete an object, its bytes included; NoSuchObject where there is none."""
    with _edited(path) as edit:
        edit.delete(object_id)


def set_primary(path: Path, object_id: int) -> None:
    """Make a system partition the primary one; the one that was becomes an ordinary one."""
    with _edited(path) as edit:
        edit.set_primary(object_id)


class _Edit:
    """A copy that is being changed. Times stay zero in a file that was made without any."""

    def __init__(self, fd: int, table: Table) -> None:
        self._fd = fd
        self._table = table
        has_times = table.head.created_s not in (0, sif_format.ZERO_TIME)
        self._now = int(time.time()) if has_times else table.head.created_s

    def add(self, item: DataObject) -> int:
        index = next((at for at, row in enumerate(self._table.rows) if not row.used), None)
        if index is None:
            raise BadObject(f"all {len(self._table.rows)} descriptors are in use")
        if self._table.find(index + 1) is not None:
            raise BadObject(f"id {index + 1} is in use, in another place of the table")
        name = item.name.encode()
        if len(name) >= _NAME_BYTES or len(item.extra) > _EXTRA_BYTES:
            raise BadObject(f"object {item.name!r}: its name or its extra field is too long")
        end = self._end()
        align = sif_format.PARTITION_ALIGNMENT if _is_partition(item) else 1
        offset = -(-end // align) * align
        linked = item.linked_object_id
        if item.linked_group_id:
            linked = sif_format.GROUP_MASK | item.linked_group_id
        row = Row(
            item.data_type,
            1,
            index + 1,
            sif_format.GROUP_MASK | item.group_id,
            linked,
            offset,
            item.size_bytes,
            offset - end + item.size_bytes,
            self._now,
            self._now,
            0,
            0,
            name,
            item.extra,
        )
        if row.is_primary:
            if any(one.is_primary for one in self._table.used()):
                raise BadObject("there is a primary system partition already")
            self._table.head.arch = _arch(row)
        self._table.rows[index] = row
        self._write(item, offset)
        return index + 1

    def delete(self, object_id: int) -> None:
        row = self._find(object_id)
        at, end = row.offset_bytes, row.end
        while at < end:
            step = min(len(_ZEROS), end - at)
            pwrite(self._fd, _ZEROS[:step], at)
            at += step
        if row.is_primary:
            self._table.head.arch = sif_format.arch_code(sif_format.UNKNOWN_ARCH)
        self._table.rows[self._table.rows.index(row)] = Row()
        os.ftruncate(self._fd, self._end())

    def set_primary(self, object_id: int) -> None:
        row = self._find(object_id)
        if not row.is_partition or row.part_type not in (PartType.SYSTEM, PartType.PRIMARY_SYSTEM):
            raise BadObject(f"object {object_id} is no system partition")
        for one in self._table.used():
            if one.is_primary and one is not row:
                _set_part_type(one, PartType.SYSTEM)
                one.modified_s = self._now
        if not row.is_primary:
            _set_part_type(row, PartType.PRIMARY_SYSTEM)
            row.modified_s = self._now
        self._table.head.arch = _arch(row)

    def finish(self) -> None:
        """Write header and table; what they say about sizes and free places is made true."""
        head = self._table.head
        head.free = len(self._table.rows) - len(self._table.used())
        head.data_bytes = self._end() - head.data_offset
        head.modified_s = self._now
        pwrite(self._fd, self._table.packed_head(), 0)
        pwrite(self._fd, self._table.packed_rows(), head.table_offset)

    def _find(self, object_id: int) -> Row:
        row = self._table.find(object_id)
        if row is None:
            raise NoSuchObject(f"there is no object {object_id}")
        return row

    def _end(self) -> int:
        return max([self._table.head.data_offset, *(row.end for row in self._table.used())])

    def _write(self, item: DataObject, offset: int) -> None:
        content = item.content
        if not isinstance(content, FileContent):
            pwrite(self._fd, content, offset)
            return
        done = 0
        while done < content.size_bytes:
            step = min(_COPY_STEP_BYTES, content.size_bytes - done)
            count = copy_range(
                content.fd, self._fd, step, content.offset_bytes + done, offset + done
            )
            if count == 0:
                raise BadObject(f"object {item.name!r}: its source became shorter")
            done += count


def _is_partition(item: DataObject) -> bool:
    return item.data_type == sif_format.DataType.PARTITION


def _arch(row: Row) -> bytes:
    code: bytes = sif_format.PARTITION_EXTRA.unpack_from(row.extra)[2]
    return code


def _set_part_type(row: Row, part_type: PartType) -> None:
    fs_type, _, arch = sif_format.PARTITION_EXTRA.unpack_from(row.extra)
    packed = sif_format.PARTITION_EXTRA.pack(fs_type, part_type, arch)
    row.extra = packed + row.extra[len(packed) :]


@contextmanager
def _edited(path: Path) -> Iterator[_Edit]:
    """A checked copy to change; published in the file's place unless the change raises."""
    try:
        with ExitStack() as undo:
            source = undo.enter_context(opened(path))
            sif = read_sif(source)
            temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, fd)
            undo.callback(_unlink, temporary)
            _copy(source, fd, sif.file_size_bytes)
            edit = _Edit(fd, read_table(fd, sif))
            yield edit
            edit.finish()
            read_sif(fd)
            os.fchmod(fd, os.fstat(source).st_mode & 0o7777)
            os.fsync(fd)
            os.replace(temporary, path)
            _sync_directory(path.parent)
    except OSError as error:
        raise WriteFailed(f"{path}: {error.strerror}") from error


def _copy(source: int, target: int, size_bytes: int) -> None:
    done = 0
    while done < size_bytes:
        count = copy_range(source, target, min(_COPY_STEP_BYTES, size_bytes - done), done, done)
        if count == 0:
            raise WriteFailed("the file became shorter while it was read")
        done += count


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):  # it has its name
        path.unlink()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
