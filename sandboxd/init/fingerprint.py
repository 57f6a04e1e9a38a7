"""Whether two processes mean the same by ``protocol.h``: the daemon speaks to each PID 1 itself,
and after an upgrade that may be one of the version before."""

from __future__ import annotations

import enum
import hashlib
import struct

from sandboxd.init import protocol


def fingerprint() -> str:
    """Equal for equal protocols: every number and every layout of the mirror of ``protocol.h``."""
    words: list[str] = []
    for name, value in sorted(vars(protocol).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, int) and name.isupper():
            words.append(f"{name}={value:d}")
        elif isinstance(value, struct.Struct):
            words.append(f"{name}={value.format}")
        elif isinstance(value, type) and issubclass(value, enum.Enum):
            words += [f"{name}.{one.name}={one.value}" for one in value]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
