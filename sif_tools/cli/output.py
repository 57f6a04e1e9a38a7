"""What the verbs print: JSON, sizes, and text that came out of an image."""

from __future__ import annotations

import json
from typing import Any


def print_json(node: Any) -> None:
    """One JSON document, readable and stable."""
    print(json.dumps(node, indent=2, ensure_ascii=True))


def human_bytes(size_bytes: float) -> str:
    """`1.5 MiB`: three digits are enough for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def safe_text(text: str) -> str:
    """Text of an image for a terminal: no control characters, so no escape sequences."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
