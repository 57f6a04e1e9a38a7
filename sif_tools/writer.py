"""Write a SIF file, deterministically and atomically.

Same objects, same bytes: the UUID is zero, every time is Go's zero time, uid and gid are 0. The
file is built under a temporary name in the target directory, synced, and only then given its
name, so that no reader ever sees a part of it, and it is published 0444: published files never
change. Not for choosing what goes into an image (`convert`), nor for changing one that exists.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sif_tools import format as sif_format
from sif_tools.copying import copy_range, pwrite
from sif_tools.errors import BadObject, DestinationExists, WriteFailed
from sif_tools.format import DataType, FsType, PartType

_NAME_BYTES: Final = 128
_EXTRA_BYTES: Final = 384
_COPY_STEP_BYTES: Final = 8 << 20

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileContent:
    """The content of an object that is too large for memory: a range of an open file."""

    fd: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DataObject:
    """One object to write. `group_id` 0 is no group; links are by object id (index + 1)."""

    data_type: DataType
    content: bytes | FileContent
    name: str = ""
    group_id: int = 1
    linked_object_id: int = 0
    linked_group_id: int = 0
    extra: bytes = b""

    @property
    def size_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.size_bytes


def partition_object(
    content: bytes | FileContent,
    *,
    fs_type: FsType,
    part_type: PartType,
    arch: str,
    name: str = "",
    group_id: int = 1,
) -> DataObject:
    """A partition; `arch` is Go's name, KeyError for one SIF has no code for."""
    extra = sif_format.PARTITION_EXTRA.pack(fs_type, part_type, sif_format.arch_code(arch))
    return DataObject(DataType.PARTITION, content, name=name, group_id=group_id, extra=extra)


@dataclass(frozen=True, slots=True)
class _Placed:
    item: DataObject
    offset_bytes: int
    padded_bytes: int


def write_sif(
    path: str | os.PathLike[str],
    objects: Sequence[DataObject],
    *,
    launch_script: bytes = sif_format.LAUNCH_SCRIPT,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write and publish a SIF; returns its size in bytes.

    Without `force` an existing file is never replaced (DestinationExists). `progress` is told
    the bytes written so far. Raises BadObject or WriteFailed; nothing is left behind then.
    """
    target = Path(path)
    try:
        with ExitStack() as undo:
            temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}.tmp")
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, fd)
            undo.callback(_unlink, temporary)
            end = write_sif_to(fd, objects, launch_script=launch_script, progress=progress)
            os.fchmod(fd, 0o444)
            os.fsync(fd)
            _publish(temporary, target, force=force)
    except FileExistsError as error:
        raise DestinationExists(f"{target} exists", hint="--force replaces it") from error
    except OSError as error:
        raise WriteFailed(f"{target}: {error.strerror}") from error
    return end


def write_sif_to(
    fd: int,
    objects: Sequence[DataObject],
    *,
    launch_script: bytes = sif_format.LAUNCH_SCRIPT,
    least_descriptors: int = sif_format.DEFAULT_DESCRIPTORS,
    progress: Progress | None = None,
) -> int:
    """Write a SIF into an empty open file, unpublished; returns its size in bytes.

    A table of fewer descriptors makes a smaller file. Raises BadObject and OSError.
    """
    total = max(least_descriptors, len(objects))
    placed, end = _place(objects, data_offset(total))
    head = _header(placed, end, launch_script, total) + _table(placed)
    pwrite(fd, head[: sif_format.HEADER.size], 0)
    pwrite(fd, head[sif_format.HEADER.size :], sif_format.DESCRIPTOR_OFFSET)
    for one in placed:
        _write_content(fd, one, progress)
    # An empty last object, or none at all, would leave the file short of its table.
    os.ftruncate(fd, end)
    return end


def _place(objects: Sequence[DataObject], end: int) -> tuple[list[_Placed], int]:
    placed = []
    for item in objects:
        if len(item.name.encode()) >= _NAME_BYTES:
            raise BadObject(f"object name {item.name!r} is longer than {_NAME_BYTES - 1} bytes")
        if len(item.extra) > _EXTRA_BYTES:
            raise BadObject(f"object {item.name!r}: extra field of {len(item.extra)} bytes")
        align = sif_format.PARTITION_ALIGNMENT if item.data_type == DataType.PARTITION else 1
        offset = -(-end // align) * align
        placed.append(_Placed(item, offset, offset - end + item.size_bytes))
        end = offset + item.size_bytes
    return placed, end


def data_offset(total: int) -> int:
    """Where the data starts: right after the table of `total` descriptors."""
    return sif_format.DESCRIPTOR_OFFSET + total * sif_format.DESCRIPTOR.size


def _header(placed: Sequence[_Placed], end: int, launch_script: bytes, total: int) -> bytes:
    offset = data_offset(total)
    arch = sif_format.arch_code(sif_format.UNKNOWN_ARCH)
    for one in placed:
        if one.item.data_type == DataType.PARTITION:
            _, part_type, code = sif_format.PARTITION_EXTRA.unpack_from(one.item.extra)
            if part_type == PartType.PRIMARY_SYSTEM:
                arch = code
    return sif_format.HEADER.pack(
        launch_script,
        sif_format.MAGIC,
        sif_format.VERSION,
        arch,
        bytes(16),
        sif_format.ZERO_TIME,
        sif_format.ZERO_TIME,
        total - len(placed),
        total,
        sif_format.DESCRIPTOR_OFFSET,
        total * sif_format.DESCRIPTOR.size,
        offset,
        end - offset,
    )


def _table(placed: Sequence[_Placed]) -> bytes:
    rows = []
    for index, one in enumerate(placed):
        item = one.item
        linked = item.linked_object_id
        if item.linked_group_id:
            linked = sif_format.GROUP_MASK | item.linked_group_id
        rows.append(
            sif_format.DESCRIPTOR.pack(
                item.data_type,
                1,
                index + 1,
                sif_format.GROUP_MASK | item.group_id,
                linked,
                one.offset_bytes,
                item.size_bytes,
                one.padded_bytes,
                sif_format.ZERO_TIME,
                sif_format.ZERO_TIME,
                0,
                0,
                item.name.encode(),
                item.extra,
            )
        )
    return b"".join(rows)


def _write_content(fd: int, one: _Placed, progress: Progress | None) -> None:
    content = one.item.content
    if isinstance(content, bytes):
        pwrite(fd, content, one.offset_bytes)
        return
    done = 0
    while done < content.size_bytes:
        step = min(_COPY_STEP_BYTES, content.size_bytes - done)
        source_offset, target_offset = content.offset_bytes + done, one.offset_bytes + done
        count = copy_range(content.fd, fd, step, source_offset, target_offset)
        if count == 0:
            raise BadObject(f"object {one.item.name!r}: its source became shorter")
        done += count
        if progress is not None:
            progress(target_offset + count)


def _publish(temporary: Path, target: Path, *, force: bool) -> None:
    """Give the finished file its name; the directory is synced so that the name survives too."""
    if force:
        os.replace(temporary, target)
    else:
        # link(2) never replaces, where rename(2) silently would.
        os.link(temporary, target)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):  # renamed to its final name
        path.unlink()
