"""Sign a SIF: one PGP signature object for each group of objects."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from sif_tools.edit import add_object
from sif_tools.errors import BadObject
from sif_tools.format import DataType
from sif_tools.reader import opened, read_sif
from sif_tools.signing.integrity import group_ids, statement_json
from sif_tools.signing.pgp import clearsign
from sif_tools.table import read_table
from sif_tools.writer import DataObject

_SHA256: Final = 1
_EXTRA: Final = struct.Struct("<i256s")


def sign_sif(path: Path, key: str | None = None, group_id: int | None = None) -> list[int]:
    """Sign every group (or one) with a gpg key; returns the ids of the signatures added."""
    with opened(path) as fd:
        table = read_table(fd, read_sif(fd))
        groups = group_ids(table)
        if group_id is not None:
            groups = [one for one in groups if one == group_id]
        if not groups:
            raise BadObject("there is no group of objects to sign")
        messages = [(one, statement_json(fd, table, one)) for one in groups]
    added = []
    for group, message in messages:
        signed, fingerprint = clearsign(message, key)
        item = DataObject(
            DataType.SIGNATURE,
            signed,
            group_id=0,
            linked_group_id=group,
            extra=_EXTRA.pack(_SHA256, fingerprint),
        )
        added.append(add_object(path, item))
    return added
