"""Names for what the daemon makes."""

from __future__ import annotations

import base64
import secrets


def new_id(prefix: str = "sb") -> str:
    """``sb-`` and 128 random bits in base32: an id is no secret, but must not be guessed either."""
    return f"{prefix}-" + base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()
