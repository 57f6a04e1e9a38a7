"""The status page at ``/``: one file, of which a browser needs nothing else.

Without a token, since a browser cannot send one before it has a page: there is nothing in it but
how to ask. It asks for the token and then the API, as any client does. What it may do is bound by
its policy: run this very script, speak to this daemon, and nothing from anywhere else; a string
never becomes markup (``require-trusted-types-for``), and no other page may frame it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any, Final

from fastapi import APIRouter, Response

PAGE: Final = files("sandboxd.api").joinpath("pages/status.html").read_bytes()


def _hash_of(page: bytes, element: str) -> str:
    """The source expression that allows the page's one inline ``element`` (CSP level 3)."""
    inside = re.findall(rf"<{element}>(.*?)</{element}>".encode(), page, re.DOTALL)
    assert len(inside) == 1, f"the page has {len(inside)} <{element}>"
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside[0]).digest()).decode()}'"


HEADERS: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of(PAGE, 'script')}",
            f"style-src {_hash_of(PAGE, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

router = APIRouter(tags=["node"])
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/html": {"schema": {"type": "string"}}}}
}


@router.get("/", response_class=Response, responses=_RESPONSES)
async def page() -> Response:
    """The status page, for a browser; it asks for the token itself."""
    return Response(PAGE, headers=HEADERS, media_type="text/html")
