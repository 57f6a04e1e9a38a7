"""A session as a client sees it: its URL, its commands.

For: tests of sessions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass
class Shell:
    """One session of a sandbox."""

    http: httpx.Client
    url: str

    def post(self, command: str, **body: Any) -> httpx.Response:
        return self.http.post(f"{self.url}/exec", json={"command": command, **body})

    def run(self, command: str, **body: Any) -> dict[str, Any]:
        answer = self.post(command, **body)
        assert answer.status_code == httpx.codes.OK, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def out(self, command: str, **body: Any) -> str:
        """The stdout of a command that must succeed and say nothing else."""
        result = self.run(command, **body)
        assert (result["exit_code"], result["stderr"]) == (0, ""), result
        return str(result["stdout"])

    def get(self) -> dict[str, Any]:
        seen: dict[str, Any] = self.http.get(self.url).raise_for_status().json()
        return seen


@contextlib.contextmanager
def session(http: httpx.Client, sandbox: str, **body: Any) -> Iterator[Shell]:
    url = f"/v1/sandboxes/{sandbox}/sessions"
    answer = http.post(url, json=body)
    assert answer.status_code == httpx.codes.CREATED, answer.text
    shell = Shell(http, f"{url}/{answer.json()['id']}")
    try:
        yield shell
    finally:
        assert http.delete(shell.url).status_code == httpx.codes.NO_CONTENT
