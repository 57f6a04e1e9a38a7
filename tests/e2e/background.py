"""A background process as a client sees it: its URL, its output by offsets, its end.

For: tests of background processes and of what is built on them.
"""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import Any

import httpx

WAIT_S = 30.0


@dataclass
class Background:
    """One process of a sandbox."""

    http: httpx.Client
    url: str

    @classmethod
    def start(cls, http: httpx.Client, sandbox: str, command: Any, **body: Any) -> Background:
        url = f"/v1/sandboxes/{sandbox}/processes"
        answer = http.post(url, json={"command": command, **body})
        assert answer.status_code == httpx.codes.CREATED, answer.text
        return cls(http, f"{url}/{answer.json()['id']}")

    @property
    def id(self) -> str:
        return self.url.rpartition("/")[2]

    def get(self, **query: Any) -> dict[str, Any]:
        answer = self.http.get(self.url, params=query)
        assert answer.status_code == httpx.codes.OK, answer.text
        seen: dict[str, Any] = answer.json()
        return seen

    def read(self, stream: str = "stdout", offset: int = 0, until: bytes = b"") -> bytes:
        """All of a stream from an offset on, until it holds `until` or the process has ended."""
        data, deadline = b"", time.monotonic() + WAIT_S
        while True:
            query = {f"{stream}_offset": offset + len(data), "wait_s": 5, "encoding": "base64"}
            seen = self.get(**query)
            piece = seen[stream]
            assert (piece["offset"], piece["lost_bytes"]) == (offset + len(data), 0)
            data += base64.b64decode(piece["data"])
            assert piece["next_offset"] == offset + len(data)
            if (until and until in data) or (
                seen["state"] != "running" and len(data) + offset == piece["total_bytes"]
            ):
                return data
            assert time.monotonic() < deadline, data[-200:]

    def wait(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while (seen := self.get(wait_s=5))["state"] == "running":
            assert time.monotonic() < deadline
        return seen

    def write(self, data: bytes, **query: Any) -> httpx.Response:
        return self.http.post(
            f"{self.url}/stdin",
            content=data,
            headers={"Content-Type": "application/octet-stream"},
            params=query,
        )

    def signal(self, name: str | int, scope: str = "process") -> httpx.Response:
        return self.http.post(f"{self.url}/signal", json={"signal": name, "scope": scope})

    def remove(self) -> None:
        answer = self.http.delete(self.url)
        assert answer.status_code == httpx.codes.NO_CONTENT, answer.text
