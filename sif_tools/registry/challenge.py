"""What a 401 asks for (RFC 9110 section 11, and the distribution project's token scheme)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_SCHEME: Final = re.compile(r"\s*,?\s*([A-Za-z0-9!#$%&'*+.^_`|~-]+)(?:\s+|$)")
_PARAMETER: Final = re.compile(r'\s*,?\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))')


@dataclass(frozen=True, slots=True)
class Challenge:
    """`scheme` and the parameters' names are in lower case."""

    scheme: str
    parameters: dict[str, str]


def parse_challenges(headers: Iterable[str]) -> list[Challenge]:
    """Every challenge of every WWW-Authenticate header; what is not understood is left out."""
    found = []
    for text in headers:
        at = 0
        while match := _SCHEME.match(text, at):
            at = match.end()
            parameters: dict[str, str] = {}
            while parameter := _PARAMETER.match(text, at):
                at = parameter.end()
                key, quoted, plain = parameter.groups()
                parameters[key.lower()] = (
                    plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                )
            found.append(Challenge(match[1].lower(), parameters))
    return found
