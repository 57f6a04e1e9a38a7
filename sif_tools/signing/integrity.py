"""What a signature covers, and its JSON.

    {"version": 1,
     "header": {"digest": "sha256:…"},
     "objects": [{"relativeId": 0, "descriptorDigest": "sha256:…", "objectDigest": "sha256:…"}, …]}

Of the header: launch script, magic, version and UUID. Of a descriptor: type, used, id relative to
the lowest in its group, link, size, time of creation, uid, gid, name and extra; not where it lies,
so that objects may be moved, nor its group. The form before that is text: `SIFHASH:`, a line break
and the hexadecimal hash of the objects' bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from sif_tools import format as sif_format
from sif_tools.errors import BadSif
from sif_tools.format import DataType
from sif_tools.reader import pread
from sif_tools.table import Row, Table

VERSION: Final = 1
LEGACY_PREFIX: Final = "SIFHASH:\n"
# The number in a signature's descriptor; BLAKE2 was never written.
HASH_NAMES: Final = {1: "sha256", 2: "sha384", 3: "sha512"}
_DIGEST_NAMES: Final = {
    "sha224": "sha224",
    "sha256": "sha256",
    "sha384": "sha384",
    "sha512": "sha512",
    "sha512_224": "sha512_224",
    "sha512_256": "sha512_256",
}
_COVERED: Final = struct.Struct("<iBIIqqqq128s384s")
_STEP_BYTES: Final = 4 << 20
_DIGEST: Final = re.compile(r"([a-z0-9_]+):([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class ObjectDigests:
    relative_id: int
    descriptor: str
    content: str


@dataclass(frozen=True, slots=True)
class Statement:
    """The JSON, parsed: digests as `NAME:HEX`."""

    header: str
    objects: tuple[ObjectDigests, ...]


def group_rows(table: Table, group_id: int) -> list[Row]:
    """The objects of a group, by id; signatures are never part of what is signed."""
    found = [
        row
        for row in table.used()
        if row.group & ~sif_format.GROUP_MASK == group_id and row.data_type != DataType.SIGNATURE
    ]
    return sorted(found, key=lambda row: row.object_id)


def group_ids(table: Table) -> list[int]:
    """Every group that has something to sign."""
    found = {
        row.group & ~sif_format.GROUP_MASK
        for row in table.used()
        if row.data_type != DataType.SIGNATURE
    }
    return sorted(found - {0})


def lowest_id(table: Table, group_id: int) -> int:
    """What relative ids count from: the lowest id of anything in the group."""
    return min(
        row.object_id for row in table.used() if row.group & ~sif_format.GROUP_MASK == group_id
    )


def statement_json(fd: int, table: Table, group_id: int) -> bytes:
    """What is signed for a group, spelled as Go spells it."""
    rows, lowest = group_rows(table, group_id), lowest_id(table, group_id)
    node = {
        "version": VERSION,
        "header": {"digest": header_digest(table, "sha256")},
        "objects": [
            {
                "relativeId": row.object_id - lowest,
                "descriptorDigest": descriptor_digest(row, row.object_id - lowest, "sha256"),
                "objectDigest": content_digest(fd, [row], "sha256"),
            }
            for row in rows
        ],
    }
    return json.dumps(node, separators=(",", ":")).encode()


def parse_statement(data: bytes) -> Statement:
    """BadSif for anything else."""
    try:
        node = json.loads(data)
        if node["version"] != VERSION:
            raise BadSif(f"a signature of version {str(node['version'])[:20]}")
        return Statement(
            _text(node["header"]["digest"]),
            tuple(
                ObjectDigests(
                    _number(one["relativeId"]),
                    _text(one["descriptorDigest"]),
                    _text(one["objectDigest"]),
                )
                for one in node["objects"]
            ),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadSif("what is signed is not the JSON that it should be") from error


def header_digest(table: Table, algorithm: str) -> str:
    head = table.head
    return _digest(algorithm, [head.launch_script, head.magic, head.version, head.uuid])


def descriptor_digest(row: Row, relative_id: int, algorithm: str) -> str:
    covered = _COVERED.pack(
        row.data_type,
        row.used,
        relative_id,
        row.linked,
        row.size_bytes,
        row.created_s,
        row.uid,
        row.gid,
        row.name,
        row.extra,
    )
    return _digest(algorithm, [covered])


def content_digest(fd: int, rows: Iterable[Row], algorithm: str) -> str:
    """Of the bytes of objects, one after another."""
    return _digest(algorithm, (piece for row in rows for piece in _pieces(fd, row)))


def algorithm_of(digest: str) -> str:
    """The hash of `NAME:HEX`; BadSif for one that is not known."""
    found = _DIGEST.fullmatch(digest)
    if found is None or found[1] not in _DIGEST_NAMES:
        raise BadSif(f"digest {digest[:32]!r} is of no known kind")
    return found[1]


def _pieces(fd: int, row: Row) -> Iterable[bytes]:
    at = row.offset_bytes
    while at < row.end:
        piece = pread(fd, min(_STEP_BYTES, row.end - at), at)
        if not piece:
            raise BadSif(f"object {row.object_id} ends past the end of the file")
        at += len(piece)
        yield piece


def _digest(algorithm: str, pieces: Iterable[bytes]) -> str:
    hashed = hashlib.new(_DIGEST_NAMES[algorithm])
    for piece in pieces:
        hashed.update(piece)
    return f"{algorithm}:{hashed.hexdigest()}"


def _text(node: Any) -> str:
    if not isinstance(node, str):
        raise TypeError
    return node


def _number(node: Any) -> int:
    if not isinstance(node, int) or isinstance(node, bool) or not 0 <= node < 1 << 32:
        raise TypeError
    return node
