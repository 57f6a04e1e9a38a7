"""Reading a stream of frames as a client would: line by line, over a connection of its own.

For: tests of streams. What holds for every stream is checked here: seqs without a gap, one
explicit end.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx

NDJSON = {"Accept": "application/x-ndjson"}
Frame = dict[str, Any]


@contextlib.contextmanager
def open_stream(
    client: httpx.Client, url: str, body: dict[str, Any] | None = None, **query: int
) -> Iterator[Iterator[Frame]]:
    """POST with a body, GET without; the frames as they come. Leaving early cuts it off."""
    method = "GET" if body is None else "POST"
    with client.stream(method, url, json=body, params=query, headers=NDJSON) as answer:
        if answer.status_code != httpx.codes.OK:
            answer.read()
            raise AssertionError(answer.text)
        assert answer.headers["content-type"] == NDJSON["Accept"]
        yield (json.loads(line) for line in answer.iter_lines())


def whole(frames: list[Frame], first_seq: int = 0) -> list[Frame]:
    """The frames less the heartbeats, checked."""
    kept = [frame for frame in frames if frame["type"] != "heartbeat"]
    assert [frame["seq"] for frame in kept] == list(range(first_seq, first_seq + len(kept)))
    ends = [frame for frame in kept if frame["type"] in ("exit", "error")]
    assert ends == kept[-1:]
    return kept


def run(client: httpx.Client, url: str, body: dict[str, Any]) -> list[Frame]:
    with open_stream(client, url, body) as frames:
        return whole(list(frames))


def output(frames: list[Frame], kind: str) -> bytes:
    data = b""
    for frame in frames:
        if frame["type"] == kind:
            text = frame["data"]
            data += base64.b64decode(text) if frame["encoding"] == "base64" else text.encode()
    return data
