"""The shortcut and the general way give the same answers."""

from __future__ import annotations

import pytest
from starlette.types import Scope

from sandboxd.api.shortcut import ROOT, _handler


def scope(method: str, path: str, query: bytes = b"", *headers: tuple[bytes, bytes]) -> Scope:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": list(headers),
    }


@pytest.mark.parametrize(
    "taken",
    [
        scope("POST", ROOT),
        scope("POST", ROOT, b"", (b"idempotency-key", b"abc")),
        scope("POST", f"{ROOT}/sb-1/exec"),
        scope("DELETE", f"{ROOT}/sb-1"),
    ],
)
def test_the_plain_requests_take_it(taken: Scope) -> None:
    assert _handler(taken) is not None


@pytest.mark.parametrize(
    "other",
    [
        {"type": "websocket", "path": ROOT},
        scope("GET", ROOT),
        scope("DELETE", ROOT),
        scope("POST", ROOT + "/"),
        scope("POST", ROOT, b"x=1"),
        scope("POST", ROOT, b"", (b"idempotency-key", b"a b")),
        scope("POST", ROOT, b"", (b"idempotency-key", b"")),
        scope("POST", ROOT, b"", (b"idempotency-key", b"x" * 256)),
        scope("POST", ROOT, b"", (b"idempotency-key", b"a"), (b"idempotency-key", b"b")),
        scope("DELETE", f"{ROOT}/sb-1/exec"),
        scope("POST", f"{ROOT}/sb-1/exec/"),
        scope("POST", f"{ROOT}/sb-1/exec\n"),
        scope("POST", f"{ROOT}/../exec"),
        scope("POST", f"{ROOT}/a/b/exec"),
        scope("POST", f"{ROOT}/batch"),
        scope("DELETE", f"{ROOT}/{'x' * 65}"),
        scope("GET", f"{ROOT}/sb-1"),
        scope("PUT", f"{ROOT}/sb-1/files"),
    ],
)
def test_all_others_go_the_general_way(other: Scope) -> None:
    assert _handler(other) is None
