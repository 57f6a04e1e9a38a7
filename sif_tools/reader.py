"""Parse a SIF: header and descriptors, with every structural check, from untrusted bytes.

For learning what is in a file and where. Not for judging whether the primary partition can be
mounted (`partition`), nor for what its config says (`image_config`): a SIF may be perfectly valid
and hold nothing that this host could run.

Only `pread` is used, so an fd shared with others keeps its position; nothing is read that the
file's own size does not cover, and the descriptor table is the largest thing held in memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from sif_tools import format as sif_format
from sif_tools.errors import BadSif, NotASif, Unreadable, UnsupportedVersion
from sif_tools.format import DataType, PartType

# Apptainer writes 48 and grows by need; 2.4 MB of table is beyond any real file.
MAX_DESCRIPTORS: Final = 4096

FdOrPath = int | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Header:
    """The global header, decoded. Times are Unix seconds, `arch` is Go's name."""

    launch_script: bytes
    arch: str
    uuid: bytes
    created_s: int
    modified_s: int
    descriptors_free: int
    descriptors_total: int
    descriptors_offset: int
    descriptors_size_bytes: int
    data_offset: int
    data_size_bytes: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One data object in use. `group_id` is 0 for none; a link is to an object or to a group."""

    data_type: int
    object_id: int
    group_id: int
    linked_object_id: int
    linked_group_id: int
    offset_bytes: int
    size_bytes: int
    created_s: int
    modified_s: int
    name: str
    extra: bytes

    @property
    def type_name(self) -> str:
        """`json`, `partition` …; the number in hexadecimal where the type is not known."""
        try:
            return DataType(self.data_type).name.lower().replace("_", "-")
        except ValueError:
            return hex(self.data_type)

    @property
    def is_partition(self) -> bool:
        return self.data_type == DataType.PARTITION

    @property
    def is_primary(self) -> bool:
        return self.is_partition and self.part_type == PartType.PRIMARY_SYSTEM

    @property
    def fs_type(self) -> int:
        """File system of a partition, as stored (may be no `FsType`)."""
        return int(sif_format.PARTITION_EXTRA.unpack_from(self.extra)[0])

    @property
    def part_type(self) -> int:
        """Kind of a partition, as stored (may be no `PartType`)."""
        return int(sif_format.PARTITION_EXTRA.unpack_from(self.extra)[1])

    @property
    def arch(self) -> str:
        """Architecture of a partition, Go's name."""
        return sif_format.arch_name(sif_format.PARTITION_EXTRA.unpack_from(self.extra)[2])


@dataclass(frozen=True, slots=True)
class Sif:
    """A parsed SIF: nothing in it refers to the open file."""

    header: Header
    descriptors: tuple[Descriptor, ...]
    file_size_bytes: int

    @property
    def primary(self) -> Descriptor | None:
        """The primary system partition's descriptor, where there is one."""
        return next((one for one in self.descriptors if one.is_primary), None)

    def named(self, name: str, data_type: DataType) -> Descriptor | None:
        """The first object of that name and type."""
        for one in self.descriptors:
            if one.name == name and one.data_type == data_type:
                return one
        return None


def read_sif(source: FdOrPath) -> Sif:
    """Parse and check a SIF given as an open fd or a path.

    Raises Unreadable, NotASif, UnsupportedVersion or BadSif, and nothing else, whatever the bytes.
    """
    with opened(source) as fd:
        status = _fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotASif("not a regular file")
        header = _parse_header(pread(fd, sif_format.HEADER.size, 0))
        _check_table(header, status.st_size)
        table = pread(fd, header.descriptors_size_bytes, header.descriptors_offset)
        if len(table) != header.descriptors_size_bytes:
            raise BadSif("the file became shorter while it was read")
        descriptors = tuple(_parse_descriptors(table))
        _check_objects(header, descriptors, status.st_size)
        _check_primary(header, descriptors)
        return Sif(header, descriptors, status.st_size)


def read_object(source: FdOrPath, descriptor: Descriptor, *, limit_bytes: int) -> bytes:
    """The bytes of one data object; BadSif where they are more than `limit_bytes`."""
    if descriptor.size_bytes > limit_bytes:
        raise BadSif(
            f"object {descriptor.object_id} ({descriptor.name!r}) has {descriptor.size_bytes} "
            f"bytes, more than the {limit_bytes} allowed for its kind"
        )
    with opened(source) as fd:
        data = pread(fd, descriptor.size_bytes, descriptor.offset_bytes)
    if len(data) != descriptor.size_bytes:
        raise BadSif(f"object {descriptor.object_id} ends past the end of the file")
    return data


@contextmanager
def opened(source: FdOrPath) -> Iterator[int]:
    """The fd itself, or the path opened for the duration."""
    if isinstance(source, int):
        yield source
        return
    try:
        # O_NONBLOCK: opening a FIFO in the image's place must not hang; no effect on files.
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unreadable(f"{os.fspath(source)}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the path
        raise Unreadable(str(error)) from error
    try:
        yield fd
    finally:
        os.close(fd)


def pread(fd: int, size_bytes: int, offset: int) -> bytes:
    """Read up to `size_bytes` at `offset`, short only at the end of the file."""
    pieces = []
    while size_bytes > 0:
        try:
            piece = os.pread(fd, size_bytes, offset)
        except OSError as error:
            raise Unreadable(f"read at offset {offset}: {error.strerror}") from error
        if not piece:
            break
        pieces.append(piece)
        size_bytes -= len(piece)
        offset += len(piece)
    return b"".join(pieces)


def _fstat(fd: int) -> os.stat_result:
    try:
        return os.fstat(fd)
    except OSError as error:
        raise Unreadable(f"fstat: {error.strerror}") from error


def _parse_header(raw: bytes) -> Header:
    if len(raw) < sif_format.HEADER.size:
        raise NotASif(f"only {len(raw)} bytes, a SIF header has {sif_format.HEADER.size}")
    (launch, magic, version, arch, uuid, created, modified, *numbers) = sif_format.HEADER.unpack(
        raw
    )
    if magic != sif_format.MAGIC:
        raise NotASif("no SIF magic")
    if version != sif_format.VERSION:
        raise UnsupportedVersion(f"SIF version {version!r}, only {sif_format.VERSION!r} is known")
    return Header(
        launch.rstrip(b"\0"), sif_format.arch_name(arch), uuid, created, modified, *numbers
    )


def _check_table(header: Header, file_size: int) -> None:
    total = header.descriptors_total
    if not 0 <= total <= MAX_DESCRIPTORS:
        raise BadSif(f"{total} descriptors, expected 0 to {MAX_DESCRIPTORS}")
    if not 0 <= header.descriptors_free <= total:
        raise BadSif(f"{header.descriptors_free} of {total} descriptors said to be free")
    if header.descriptors_size_bytes != total * sif_format.DESCRIPTOR.size:
        raise BadSif(
            f"descriptor table of {header.descriptors_size_bytes} bytes for {total} descriptors"
        )
    if header.descriptors_offset < sif_format.HEADER.size:
        raise BadSif(f"descriptor table at {header.descriptors_offset}, inside the header")
    table_end = header.descriptors_offset + header.descriptors_size_bytes
    if table_end > file_size:
        raise BadSif(f"descriptor table ends at {table_end}, past the file's end at {file_size}")
    if header.data_offset < table_end:
        raise BadSif(f"data at {header.data_offset}, before the descriptor table's end")
    if header.data_size_bytes < 0:
        raise BadSif(f"negative data size {header.data_size_bytes}")
    # An empty file of an old writer names a data offset past its end, and no data.
    if header.data_size_bytes and header.data_offset + header.data_size_bytes > file_size:
        raise BadSif(
            f"data ends at {header.data_offset + header.data_size_bytes}, "
            f"past the file's end at {file_size}"
        )


def _parse_descriptors(table: bytes) -> Iterator[Descriptor]:
    for fields in sif_format.DESCRIPTOR.iter_unpack(table):
        (data_type, used, object_id, group, linked, offset, size) = fields[:7]
        (_padded, created, modified, _uid, _gid, name, extra) = fields[7:]
        if not used:
            continue
        is_group_link = linked & sif_format.GROUP_MASK == sif_format.GROUP_MASK
        yield Descriptor(
            data_type=data_type,
            object_id=object_id,
            group_id=group & ~sif_format.GROUP_MASK,
            linked_object_id=0 if is_group_link else linked,
            linked_group_id=linked & ~sif_format.GROUP_MASK if is_group_link else 0,
            offset_bytes=offset,
            size_bytes=size,
            created_s=created,
            modified_s=modified,
            name=name.split(b"\0", 1)[0].decode("utf-8", "backslashreplace"),
            extra=extra,
        )


def _check_objects(header: Header, descriptors: tuple[Descriptor, ...], file_size: int) -> None:
    table_end = header.descriptors_offset + header.descriptors_size_bytes
    ids: set[int] = set()
    for one in descriptors:
        what = f"object {one.object_id}"
        if one.object_id == 0 or one.object_id in ids:
            raise BadSif(f"{what}: id is zero or used twice")
        ids.add(one.object_id)
        if one.size_bytes < 0:
            raise BadSif(f"{what}: negative size {one.size_bytes}")
        # The descriptor table follows the header, so this keeps objects out of both.
        if one.offset_bytes < table_end:
            raise BadSif(f"{what}: at {one.offset_bytes}, before the descriptor table's end")
        if one.offset_bytes + one.size_bytes > file_size:
            raise BadSif(
                f"{what}: ends at {one.offset_bytes + one.size_bytes}, "
                f"past the file's end at {file_size}"
            )
    # Empty objects share no byte with anything and would only upset the comparison of neighbours.
    spans = sorted((one for one in descriptors if one.size_bytes), key=lambda d: d.offset_bytes)
    for before, after in pairwise(spans):
        if before.offset_bytes + before.size_bytes > after.offset_bytes:
            raise BadSif(f"objects {before.object_id} and {after.object_id} overlap")


def _check_primary(header: Header, descriptors: tuple[Descriptor, ...]) -> None:
    primaries = [one for one in descriptors if one.is_primary]
    if len(primaries) > 1:
        raise BadSif(f"{len(primaries)} primary system partitions")
    if primaries and primaries[0].arch != header.arch:
        raise BadSif(
            f"primary partition made for {primaries[0].arch}, the header says {header.arch}"
        )
