"""What a SIF that is laid over others says of itself, in its object `sif-tools-delta.json`.

::

    {"version": 1, "below": ["sha256:<base>", …]}        in a delta: base first
    {"version": 1, "layers": ["sha256:<diff_id>", …]}    in a shared part: equal layers over
                                                         different bases are then equal files
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sif_tools.format import DataType
from sif_tools.reader import Sif, read_object
from sif_tools.writer import DataObject

DELTA_NAME: Final = "sif-tools-delta.json"
_VERSION: Final = 1
_MAX_BYTES: Final = 4 << 20


def delta_object(**said: Any) -> DataObject:
    """The object, with the version added."""
    node = {"version": _VERSION} | said
    data = json.dumps(node, separators=(",", ":")).encode()
    return DataObject(DataType.JSON, data, name=DELTA_NAME)


def read_delta(sif: Sif, source: Path | int) -> Mapping[str, Any]:
    """What it says. Raises ValueError, SifError."""
    descriptor = sif.named(DELTA_NAME, DataType.JSON)
    if descriptor is None:
        raise ValueError(f"a SIF without a primary partition and without {DELTA_NAME}")
    node = json.loads(read_object(source, descriptor, limit_bytes=_MAX_BYTES))
    if not isinstance(node, dict) or node.get("version") != _VERSION:
        raise ValueError(f"{DELTA_NAME} is of a version that is not known")
    return node
