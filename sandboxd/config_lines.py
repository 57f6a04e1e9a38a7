"""In which line of a TOML file each key stands: ``tomllib`` does not say.

Made for a file that ``tomllib`` takes, with the keys of a configuration: bare, quoted or dotted, in
tables. What is found no line for is an error without one, never a wrong one.
"""

from __future__ import annotations

import re
from typing import Final

_PART: Final = r"""(?:[A-Za-z0-9_-]+|"[^"\\]*"|'[^']*')"""
_NAME: Final = rf"{_PART}(?:\s*\.\s*{_PART})*"
_TABLE: Final = re.compile(rf"\s*\[\s*({_NAME})\s*\]\s*(?:#.*)?$")
_KEY: Final = re.compile(rf"\s*({_NAME})\s*=\s*(.*)$")
_PARTS: Final = re.compile(_PART)
_QUOTES: Final = ('"""', "'''")


def key_lines(text: str) -> dict[str, int]:
    """Line, from 1 on, by dotted key; that of a table is its header's."""
    found: dict[str, int] = {}
    table: tuple[str, ...] = ()
    until = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if until:
            if until in line:
                until = ""
            continue
        if header := _TABLE.match(line):
            table = _parts(header[1])
            found.setdefault(".".join(table), number)
        elif pair := _KEY.match(line):
            keys = (*table, *_parts(pair[1]))
            # A dotted key makes the tables above it too.
            for depth in range(len(table) + 1, len(keys) + 1):
                found.setdefault(".".join(keys[:depth]), number)
            until = next((q for q in _QUOTES if pair[2].startswith(q)), "")
            if until and until in pair[2][len(until) :]:
                until = ""
    return found


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PARTS.findall(name))
