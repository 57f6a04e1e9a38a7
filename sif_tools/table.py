"""A SIF's header and descriptor table as they are stored: for changing one, and for signing.

`reader` gives the meaning and checks it; here every field keeps its bytes, those included that no
reader looks at, because a signature covers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sif_tools import format as sif_format
from sif_tools.errors import BadSif
from sif_tools.format import DataType, PartType
from sif_tools.reader import Sif, pread


@dataclass(slots=True)
class Row:
    """One descriptor; the fields of `format.DESCRIPTOR`, in its order."""

    data_type: int = 0
    used: int = 0
    object_id: int = 0
    group: int = 0
    linked: int = 0
    offset_bytes: int = 0
    size_bytes: int = 0
    padded_bytes: int = 0
    created_s: int = 0
    modified_s: int = 0
    uid: int = 0
    gid: int = 0
    name: bytes = b""
    extra: bytes = b""

    @property
    def is_partition(self) -> bool:
        return self.data_type == DataType.PARTITION

    @property
    def part_type(self) -> int:
        return int(sif_format.PARTITION_EXTRA.unpack_from(self.extra)[1])

    @property
    def is_primary(self) -> bool:
        return self.is_partition and self.part_type == PartType.PRIMARY_SYSTEM

    @property
    def end(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(slots=True)
class Head:
    """The header; the fields of `format.HEADER`, in its order."""

    launch_script: bytes
    magic: bytes
    version: bytes
    arch: bytes
    uuid: bytes
    created_s: int
    modified_s: int
    free: int
    total: int
    table_offset: int
    table_bytes: int
    data_offset: int
    data_bytes: int


_HEAD_FIELDS: Final = tuple(Head.__dataclass_fields__)
_ROW_FIELDS: Final = tuple(Row.__dataclass_fields__)


@dataclass(slots=True)
class Table:
    """Header and descriptors, used or not, in the order of the file."""

    head: Head
    rows: list[Row]

    def used(self) -> list[Row]:
        return [row for row in self.rows if row.used]

    def find(self, object_id: int) -> Row | None:
        return next((row for row in self.used() if row.object_id == object_id), None)

    def packed_head(self) -> bytes:
        return sif_format.HEADER.pack(*(getattr(self.head, name) for name in _HEAD_FIELDS))

    def packed_rows(self) -> bytes:
        pack = sif_format.DESCRIPTOR.pack
        return b"".join(pack(*(getattr(row, name) for name in _ROW_FIELDS)) for row in self.rows)


def read_table(fd: int, sif: Sif) -> Table:
    """The table of a SIF that `read_sif` has found to be sane."""
    header = sif.header
    head = pread(fd, sif_format.HEADER.size, 0)
    rows = pread(fd, header.descriptors_size_bytes, header.descriptors_offset)
    if len(head) < sif_format.HEADER.size or len(rows) < header.descriptors_size_bytes:
        raise BadSif("the file became shorter while it was read")
    return Table(
        Head(*sif_format.HEADER.unpack(head)),
        [Row(*fields) for fields in sif_format.DESCRIPTOR.iter_unpack(rows)],
    )
