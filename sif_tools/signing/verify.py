"""Verify a SIF's signatures: by whom, over what, and whether that is what is there.

Two questions are kept apart: whether the digests in a signature match the file (anybody can see
that), and whether a key that is trusted made it. Only both together prove anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sif_tools import format as sif_format
from sif_tools.errors import BadSif
from sif_tools.format import DataType
from sif_tools.reader import Sif, opened, pread, read_sif
from sif_tools.signing import dsse, pgp
from sif_tools.signing.integrity import (
    HASH_NAMES,
    LEGACY_PREFIX,
    algorithm_of,
    content_digest,
    descriptor_digest,
    group_ids,
    group_rows,
    header_digest,
    lowest_id,
    parse_statement,
)
from sif_tools.table import Row, Table, read_table

_MAX_SIGNATURE_BYTES: Final = 1 << 20
_EXTRA: Final = struct.Struct("<i256s")


@dataclass(slots=True)
class SignatureReport:
    """One signature object. `signer`: a key's fingerprint, or the files of keys (DSSE)."""

    object_id: int
    form: str
    group_id: int
    covers: list[int] = field(default_factory=list)
    signer: str = ""
    is_trusted: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        return self.is_trusted and not self.problems


@dataclass(slots=True)
class Verification:
    signatures: list[SignatureReport]
    unsigned_groups: list[int]
    unsigned_objects: list[int]

    @property
    def is_valid(self) -> bool:
        """Every group is covered by a valid signature, and no signature is bad."""
        return (
            bool(self.signatures)
            and not self.unsigned_groups
            and all(one.is_valid for one in self.signatures)
        )


def verify_sif(
    path: Path,
    *,
    pgp_keys: Sequence[Path] = (),
    dsse_keys: Sequence[Path] = (),
    legacy: bool = False,
) -> Verification:
    """Look at every signature. Without `pgp_keys` the user's own gpg keyring is asked.

    `legacy` also counts signatures of the form before Singularity 3.6, which leave the header and
    the descriptors open to change.
    """
    with ExitStack() as stack:
        fd = stack.enter_context(opened(path))
        sif = read_sif(fd)
        table = read_table(fd, sif)
        home = stack.enter_context(pgp.keyring(pgp_keys))
        checker = _Checker(fd, sif, table, home, dsse_keys)
        reports = [
            checker.check(row) for row in table.used() if row.data_type == DataType.SIGNATURE
        ]
    if not legacy:
        for one in reports:
            if one.form == "pgp-legacy":
                one.problems.append("of the old form, which proves too little")
    covered = {one for report in reports if report.is_valid for one in report.covers}
    groups = group_ids(table)
    unsigned = [
        one for one in groups if not {row.object_id for row in group_rows(table, one)} <= covered
    ]
    objects = [
        row.object_id
        for row in table.used()
        if row.data_type != DataType.SIGNATURE and row.object_id not in covered
    ]
    return Verification(reports, unsigned, objects)


class _Checker:
    def __init__(
        self, fd: int, sif: Sif, table: Table, home: Path | None, dsse_keys: Sequence[Path]
    ) -> None:
        self._fd = fd
        self._sif = sif
        self._table = table
        self._home = home
        self._dsse_keys = dsse_keys

    def check(self, row: Row) -> SignatureReport:
        linked = row.linked & ~sif_format.GROUP_MASK
        is_group = row.linked & sif_format.GROUP_MASK == sif_format.GROUP_MASK
        report = SignatureReport(row.object_id, "unknown", linked if is_group else 0)
        if row.size_bytes > _MAX_SIGNATURE_BYTES:
            report.problems.append(f"{row.size_bytes} bytes are no signature")
            return report
        data = pread(self._fd, row.size_bytes, row.offset_bytes)
        try:
            if pgp.is_clearsigned(data):
                text = self._check_pgp(row, data, report)
            else:
                text = self._check_dsse(data, report)
            if text.startswith(LEGACY_PREFIX.encode()):
                report.form = "pgp-legacy"
                self._compare_legacy(row, text, report)
            else:
                self._compare(text, report)
        except BadSif as error:
            report.problems.append(error.message)
        return report

    def _check_pgp(self, row: Row, data: bytes, report: SignatureReport) -> bytes:
        report.form = "pgp"
        verdict = pgp.verify_clearsigned(data, self._home)
        if verdict.problem is not None:
            report.problems.append(verdict.problem)
            # Only what the descriptor claims.
            report.signer = _entity(row).hex().upper()
            return verdict.text
        report.signer = verdict.fingerprint.hex().upper()
        if _entity(row) != verdict.fingerprint:
            report.problems.append("the descriptor names another key")
        else:
            report.is_trusted = True
        return verdict.text

    def _check_dsse(self, data: bytes, report: SignatureReport) -> bytes:
        envelope = dsse.parse_envelope(data)
        if envelope is None:
            raise BadSif("is neither clearsigned nor a DSSE envelope")
        report.form = "dsse"
        keys = dsse.verified_by(envelope, self._dsse_keys)
        report.signer = ", ".join(str(key) for key in keys)
        report.is_trusted = bool(keys)
        if not keys:
            report.problems.append(
                "no given key made it" if self._dsse_keys else "the key is not known"
            )
        return envelope.payload

    def _compare(self, text: bytes, report: SignatureReport) -> None:
        """The digests, against the file as it is; exactly the group's objects must be named."""
        statement = parse_statement(text)
        rows = group_rows(self._table, report.group_id)
        if not rows or not report.group_id:
            raise BadSif("is linked to no group that is there")
        lowest = lowest_id(self._table, report.group_id)
        if header_digest(self._table, algorithm_of(statement.header)) != statement.header:
            report.problems.append("the header was changed")
        signed = {lowest + one.relative_id: one for one in statement.objects}
        for row in rows:
            digests = signed.pop(row.object_id, None)
            if digests is None:
                report.problems.append(f"object {row.object_id} is not covered")
                continue
            report.covers.append(row.object_id)
            relative = row.object_id - lowest
            algorithm = algorithm_of(digests.descriptor)
            if descriptor_digest(row, relative, algorithm) != digests.descriptor:
                report.problems.append(f"the descriptor of object {row.object_id} was changed")
            algorithm = algorithm_of(digests.content)
            if content_digest(self._fd, [row], algorithm) != digests.content:
                report.problems.append(f"object {row.object_id} was changed")
        for missing in sorted(signed):
            report.problems.append(f"object {missing} is missing")

    def _compare_legacy(self, row: Row, text: bytes, report: SignatureReport) -> None:
        number = _EXTRA.unpack_from(row.extra)[0]
        if number not in HASH_NAMES:
            raise BadSif(f"hash {number} is not known")
        if report.group_id:
            rows = group_rows(self._table, report.group_id)
        else:
            found = self._table.find(row.linked)
            rows = [found] if found is not None else []
        if not rows:
            raise BadSif("what it covers is not there")
        algorithm = HASH_NAMES[number]
        said = text.decode("latin-1").removeprefix(LEGACY_PREFIX).strip().lower()
        report.covers = [one.object_id for one in rows]
        if content_digest(self._fd, rows, algorithm) != f"{algorithm}:{said}":
            report.problems.append("what it covers was changed")


def _entity(row: Row) -> bytes:
    """The fingerprint in the descriptor: 20 bytes, or 32 of newer keys."""
    entity: bytes = _EXTRA.unpack_from(row.extra)[1]
    return entity[:20] if not any(entity[20:32]) else entity[:32]
