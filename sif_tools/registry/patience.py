"""How long a registry may keep us waiting; without an import, as the settings hold it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Patience:
    """`total_s`: how long one request may be put off in all, by Retry-After and between tries."""

    total_s: float = 300
    first_delay_s: float = 0.25


DEFAULT_PATIENCE: Final = Patience()
