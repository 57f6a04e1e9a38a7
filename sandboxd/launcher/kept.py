"""Small records that the daemon leaves here because they must outlive it: runs, a drain.

They are the daemon's own and mean nothing to the launcher. They end with it, as do the sandboxes
they are about.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sandboxd.errors import RequestError

RECORDS_MAX: Final = 8192
NAME_MAX: Final = 3200
"""Bytes of a name: a run's, in the longest form JSON may give its characters."""
RECORD_MAX: Final = 2048
"""Bytes of a record as JSON."""
PAGE: Final = 12
"""As many as fit a message, whatever is in them."""


class Kept:
    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}

    def keep(self, name: str, record: dict[str, Any] | None) -> None:
        """Keep a record in place of the one before; None keeps none. Raises RequestError."""
        if record is None:
            self._records.pop(name, None)
            return
        if len(json.dumps(record)) > RECORD_MAX or len(json.dumps(name)) > NAME_MAX:
            raise RequestError("the record is too large to be kept")
        if name not in self._records and len(self._records) >= RECORDS_MAX:
            raise RequestError(f"{RECORDS_MAX} records are kept already")
        self._records[name] = record

    def page(self, after: str) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
        """The first few behind ``after``, by name, and whether there are more."""
        names = sorted(name for name in self._records if name > after)
        return [(name, self._records[name]) for name in names[:PAGE]], len(names) > PAGE
