"""Read a tar stream: ustar, GNU and PAX with their long names, large numbers and sparse files.

Every byte is untrusted: sizes of what is held in memory are bounded, checksums are checked, and
anything that is not understood is an error that names the entry, never a guess. Types that do not
belong into an image (multi-volume parts, incremental dumps) are refused.

    0 name[100]  100 mode[8]  108 uid[8]  116 gid[8]  124 size[12]  136 mtime[12]  148 checksum[8]
    156 type     157 link[100]  257 magic[6] version[2]  265 uname[32]  297 gname[32]
    329 major[8] 337 minor[8]   345 prefix[155]
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote_to_bytes

from sif_tools.errors import BadEntry, BadLayer
from sif_tools.tarstream import sparse
from sif_tools.tarstream.chunks import ChunkCursor, Cursor
from sif_tools.tarstream.entry import (
    NO_XATTRS,
    XATTR_KINDS,
    Entry,
    Kind,
    Piece,
    is_kept_xattr,
)

BLOCK: Final = 512
# Extended headers are held in memory: the kernel allows 64 KiB an xattr and lists of 64 KiB of
# names, so 4 MiB holds what any file system could have given.
_MAX_PAX_BYTES: Final = 4 << 20
# Global records stay for the rest of the archive; git writes one, nothing writes many.
_MAX_GLOBAL_RECORDS: Final = 1000
_MAX_LONG_NAME_BYTES: Final = 64 << 10
# What squashfs (u32 time stamps, u32 ids) and Linux (the last id means "none") can hold.
_MAX_MTIME: Final = (1 << 32) - 1
_MAX_ID: Final = (1 << 32) - 2
_MAX_SIZE: Final = (1 << 62) - 1

_FIELDS: Final = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
_ZERO_BLOCK: Final = bytes(BLOCK)
_USTAR: Final = b"ustar\0"

_KINDS: Final = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"7": Kind.FILE,  # "contiguous": a plain file everywhere but on one long gone system
    b"S": Kind.FILE,
    b"1": Kind.HARDLINK,
    b"2": Kind.SYMLINK,
    b"3": Kind.CHAR_DEVICE,
    b"4": Kind.BLOCK_DEVICE,
    b"5": Kind.DIRECTORY,
    b"6": Kind.FIFO,
}
_XATTR_PREFIX: Final = b"SCHILY.xattr."
_LIBARCHIVE_XATTR_PREFIX: Final = b"LIBARCHIVE.xattr."

_Pax = dict[bytes, bytes]


@dataclass(slots=True)
class _Extended:
    """What the headers before an entry's own have said about it."""

    pax: _Pax
    sparse_pairs: list[bytes] = field(default_factory=list)
    long_name: bytes | None = None
    long_link: bytes | None = None


class TarReader:
    """One pass over the entries of a tar; implements `EntryStream`."""

    def __init__(self, chunks: Iterator[bytes] | Cursor) -> None:
        self._cursor: Cursor = ChunkCursor(chunks) if isinstance(chunks, Iterator) else chunks
        self._global_pax: _Pax = {}
        self._stored_bytes = 0
        self._padding = 0
        self._segments: sparse.Segments | None = None
        self._size_bytes = 0

    def __iter__(self) -> Iterator[Entry]:
        while True:
            entry = self._next_entry()
            if entry is None:
                return
            yield entry
            if self._cursor.skip(self._stored_bytes + self._padding):
                raise BadLayer("the tar stream ends inside this entry", entry=entry.path)
            self._stored_bytes = self._padding = 0

    @property
    def is_sparse(self) -> bool:
        """Whether the current entry is stored in another form than the one it has."""
        return self._segments is not None

    def data(self) -> Iterable[Piece]:
        """The content of the current entry, holes as zeros; BadLayer where the stream ends."""
        if self._segments is not None:
            return sparse.expand(self._segments, self._size_bytes, self._stored)
        return self._stored(self._stored_bytes)

    def drain(self) -> None:
        """Consume what follows the end marker, so that whoever hashes the stream sees all of it."""
        self._cursor.drain()

    def _stored(self, size_bytes: int) -> Iterator[memoryview]:
        for piece in self._cursor.pieces(size_bytes):
            self._stored_bytes -= len(piece)
            size_bytes -= len(piece)
            yield piece
        if size_bytes:
            raise BadLayer("the tar stream ends inside this entry")

    def _next_entry(self) -> Entry | None:
        """The next entry, its extended headers applied; None at the end of the archive."""
        extended = _Extended(dict(self._global_pax))
        while True:
            block = self._cursor.read(BLOCK)
            if not block:
                return None  # many writers leave the end marker out
            if len(block) < BLOCK:
                raise BadLayer("the tar stream ends inside a header")
            if block == _ZERO_BLOCK:
                after = self._cursor.read(BLOCK)
                if after and after != _ZERO_BLOCK[: len(after)]:
                    raise BadLayer("the tar stream has data after a zero block")
                return None
            _check_sum(block)
            fields = _FIELDS.unpack(block)
            kind = fields[7]
            if kind in (b"x", b"X", b"g"):
                size = _number(fields[4])
                body = self._extension(size, _MAX_PAX_BYTES)
                if kind == b"g":
                    _parse_pax(body, self._global_pax, [])
                    if len(self._global_pax) > _MAX_GLOBAL_RECORDS:
                        raise BadLayer("too many global extended header records")
                    extended.pax = dict(self._global_pax)
                else:
                    _parse_pax(body, extended.pax, extended.sparse_pairs)
            elif kind == b"L":
                extended.long_name = self._long(fields[4])
            elif kind == b"K":
                extended.long_link = self._long(fields[4])
            elif kind == b"V":  # the volume's label: no file
                self._extension(_number(fields[4]), _MAX_LONG_NAME_BYTES)
            else:
                return self._entry(block, fields, extended)

    def _long(self, size_field: bytes) -> bytes:
        return self._extension(_number(size_field), _MAX_LONG_NAME_BYTES).split(b"\0", 1)[0]

    def _extension(self, size_bytes: int, limit_bytes: int) -> bytes:
        if size_bytes > limit_bytes:
            raise BadLayer(f"extended header of {size_bytes} bytes, at most {limit_bytes} allowed")
        body = self._cursor.read(size_bytes)
        if len(body) < size_bytes or self._cursor.skip(-size_bytes % BLOCK):
            raise BadLayer("the tar stream ends inside an extended header")
        return body

    def _entry(self, block: bytes, fields: tuple[bytes, ...], extended: _Extended) -> Entry:
        (name, mode, uid, gid, size, mtime, _sum, flag, link, magic) = fields[:10]
        path = name.split(b"\0", 1)[0]
        if magic[:6] == _USTAR and fields[14][0]:
            # "star" keeps times at the end of the prefix and says so in the last four bytes.
            prefix = fields[14][:131] if block[508:] == b"tar\0" else fields[14]
            path = prefix.split(b"\0", 1)[0] + b"/" + path
        if extended.long_name is not None:
            path = extended.long_name
        target = link.split(b"\0", 1)[0]
        if extended.long_link is not None:
            target = extended.long_link
        pax = extended.pax
        if pax:
            path = pax.get(b"path", path)
            target = pax.get(b"linkpath", target)
        kind = _KINDS.get(flag)
        if kind is None:
            raise BadEntry(f"tar entry type {flag!r} does not belong into an image", entry=path)
        if kind is Kind.FILE and path.endswith(b"/"):
            kind = Kind.DIRECTORY  # how tars before ustar spelled it
        try:
            entry = Entry(
                path,
                kind,
                _number(mode) & 0o7777,
                _bounded(pax, b"uid", uid, _MAX_ID),
                _bounded(pax, b"gid", gid, _MAX_ID),
                _mtime(pax.get(b"mtime"), mtime),
            )
            stored = 0
            if kind is Kind.FILE:
                stored = entry.size_bytes = _bounded(pax, b"size", size, _MAX_SIZE)
            elif kind is Kind.SYMLINK or kind is Kind.HARDLINK:
                entry.link_target = target
            elif kind is Kind.CHAR_DEVICE or kind is Kind.BLOCK_DEVICE:
                entry.major, entry.minor = _device(fields[12], fields[13])
            if pax and kind in XATTR_KINDS:
                entry.xattrs = _xattrs(pax)
            self._stored_bytes, self._padding = stored, -stored % BLOCK
            self._segments = None
            if kind is Kind.FILE and (flag == b"S" or pax):
                self._set_sparse(entry, block, flag, extended)
        except BadLayer as error:
            raise error.located(entry=path) from None
        self._size_bytes = entry.size_bytes
        return entry

    def _set_sparse(self, entry: Entry, block: bytes, flag: bytes, extended: _Extended) -> None:
        pax, pairs = extended.pax, extended.sparse_pairs
        if flag == b"S":
            segments, real_size = sparse.from_gnu_header(block, self._cursor.read, _number)
        elif pax.get(b"GNU.sparse.major") == b"1":
            segments, used = sparse.from_data(self._cursor.read, self._stored_bytes)
            self._stored_bytes -= used
            real_size = _decimal(pax.get(b"GNU.sparse.realsize", b""))
        elif b"GNU.sparse.map" in pax or pairs:
            numbers = pax[b"GNU.sparse.map"].split(b",") if b"GNU.sparse.map" in pax else pairs
            segments = sparse.from_numbers([_decimal(one) for one in numbers])
            real_size = _decimal(pax.get(b"GNU.sparse.size", b""))
        else:
            return
        sparse.check(segments, real_size, self._stored_bytes)
        entry.path = pax.get(b"GNU.sparse.name", entry.path)
        entry.size_bytes = real_size
        self._segments = segments


def _check_sum(block: bytes) -> None:
    stored = _number(block[148:156])
    actual = sum(block) - sum(block[148:156]) + 8 * 0x20
    if stored == actual:
        return
    # Some old writers summed signed chars.
    signed = actual - 256 * sum(1 for byte in block[:148] + block[156:] if byte > 127)
    if stored != signed:
        raise BadLayer("not a tar stream: a header's checksum is wrong")


def _number(field: bytes) -> int:
    """An octal field, or GNU's base 256 where the first bit is set (then it may be negative)."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big")
        bits = 8 * len(field)
        if field[0] & 0x40:
            return value - (1 << bits)
        return value - (1 << (bits - 1))
    try:
        digits = field.split(b"\0", 1)[0].strip()
        return int(digits, 8) if digits else 0
    except ValueError:
        raise BadLayer(f"a header's number {field!r} is not octal") from None


def _device(major_field: bytes, minor_field: bytes) -> tuple[int, int]:
    major, minor = _number(major_field), _number(minor_field)
    # What Linux has: 12 and 20 bits.
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise BadLayer(f"device {major}:{minor} is out of range")
    return major, minor


def _decimal(text: bytes) -> int:
    # Python would also take "1_000", " 1" and thousands of digits.
    if not text.isdigit() or len(text) > 20:
        raise BadLayer(f"an extended header's number {text[:32]!r} is not decimal")
    return int(text)


def _bounded(pax: _Pax, key: bytes, field: bytes, most: int) -> int:
    text = pax.get(key) if pax else None
    value = _number(field) if text is None else _decimal(text)
    if not 0 <= value <= most:
        raise BadLayer(f"{key.decode()} {value} is out of range")
    return value


def _mtime(text: bytes | None, field: bytes) -> int:
    """Whole seconds, held within what squashfs can store (1970 to 2106)."""
    if text is None:
        value = _number(field)
    elif text.startswith(b"-"):
        value = 0
    else:
        value = _decimal(text.split(b".", 1)[0] or b"0")
    return min(max(value, 0), _MAX_MTIME)


def _parse_pax(body: bytes, pax: _Pax, sparse_pairs: list[bytes]) -> None:
    """Records `LENGTH KEY=VALUE\\n`; an empty value takes a global one back."""
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 21)
        if space < 0:
            if not body[at:].strip(b"\0"):
                return
            raise BadLayer("an extended header's record has no length")
        end = at + _decimal(body[at:space])
        equals = body.find(b"=", space + 1, end)
        if end > len(body) or equals < 0 or body[end - 1 : end] != b"\n":
            raise BadLayer("an extended header's record is broken")
        key, value = body[space + 1 : equals], body[equals + 1 : end - 1]
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            sparse_pairs.append(value)
        elif value or key.startswith(_XATTR_PREFIX):
            pax[key] = value
        else:
            pax.pop(key, None)
        at = end


def _xattrs(pax: _Pax) -> Mapping[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for key, value in pax.items():
        if key.startswith(_XATTR_PREFIX):
            name = key[len(_XATTR_PREFIX) :]
        elif key.startswith(_LIBARCHIVE_XATTR_PREFIX):
            name = unquote_to_bytes(key[len(_LIBARCHIVE_XATTR_PREFIX) :])
            if name in found:
                continue  # bsdtar writes both spellings of the same attribute
            try:
                value = base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
            except binascii.Error:
                raise BadLayer("an extended attribute is not base64") from None
        else:
            continue
        if is_kept_xattr(name):
            found[name] = value
    return found or NO_XATTRS
