"""Taking secrets out of what is to be given away.

What is known to be one (the token) wherever it stands; and what looks like one by its name, as
``password=…``, in a header or in an address. A value without a name cannot be known: so what may
hold values of workloads (environments, labels, bodies) is not gathered in the first place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

HIDDEN: Final = "[redacted]"
_NAME: Final = (
    r"[\w.-]*(?:passwd|password|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|bearer|cookie|[_-]token)[\w.-]*|token"
)
# NAME=value, "NAME": "value", Name: value; a value in quotes ends with them.
_NAMED: Final = re.compile(
    rf"(?P<head>(?<![\w.-])(?:{_NAME})[\"']?\s*[=:]\s*)(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,;&}}\]]+)",
    re.IGNORECASE,
)
_HEADER: Final = re.compile(
    r"(?P<head>\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic)\s+)?)[^\s\"',}]+",
    re.IGNORECASE,
)
_BEARER: Final = re.compile(r"(?P<head>\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_ADDRESS: Final = re.compile(r"(?P<head>\b[a-z][a-z0-9+.-]*://)[^\s/@\"']+@", re.IGNORECASE)
_PATHS: Final = re.compile(r"[\"']?(?:/|null\b)")
"""``token_file`` and its like name where a secret is, which is no secret."""


def redactor(secrets: Iterable[str]) -> Callable[[str], str]:
    """A function that hides ``secrets``, in any quoting, and what looks like one."""
    forms: set[str] = set()
    for secret in secrets:
        if secret:
            quoted = secret.replace("\\", "\\\\").replace('"', '\\"')
            forms |= {secret, repr(secret)[1:-1], quoted}
    known = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or r"(?!)")

    def redact(text: str) -> str:
        text = known.sub(HIDDEN, text)
        text = _HEADER.sub(rf"\g<head>{HIDDEN}", text)
        text = _BEARER.sub(rf"\g<head>{HIDDEN}", text)
        text = _ADDRESS.sub(rf"\g<head>{HIDDEN}@", text)
        return _NAMED.sub(_named, text)

    return redact


def _named(found: re.Match[str]) -> str:
    value = found["value"]
    if _PATHS.match(value) or value.startswith(("{", "[")):
        return found.group()
    quote = value[0] if value[0] in "\"'" else ""
    return f"{found['head']}{quote}{HIDDEN}{quote}"
