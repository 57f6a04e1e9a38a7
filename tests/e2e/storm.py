"""A storm of creates on a node that is too small for them, and what the served see of it.

For: the overload test, short in this tier and at full size in tier `load`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

if __name__ != "__main__":
    from tests.framework.daemon import Daemon

SMALL = {"memory_mb": 32, "disk_mb": 8, "pids": 16, "cpus": 0.5}


@dataclass
class Storm:
    """What became of it. Times are seconds."""

    answers: list[tuple[int, str, str | None]] = field(default_factory=list)
    """Status, code of the error, Retry-After."""
    took: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    """Of execs in the sandboxes that were there before …"""
    during: list[float] = field(default_factory=list)
    """… while the storm lasted."""

    @property
    def served(self) -> int:
        return sum(status == 201 for status, _, _ in self.answers)


def rage(daemon: Daemon, creates: int, probed: Sequence[str], wait_s: float = 0.0) -> Storm:
    """Ask for `creates` sandboxes at once, and go on running commands in `probed` meanwhile.

    The creates come from a process of their own: what the commands take is to be the daemon's.
    """
    storm = Storm()
    with httpx.Client(
        base_url=daemon.base_url, headers={"Authorization": f"Bearer {daemon.token}"}, timeout=120
    ) as client:

        def probe(sandbox: str, times: list[float]) -> None:
            began = time.monotonic()
            answer = client.post(
                f"/v1/sandboxes/{sandbox}/exec", json={"command": ["/bin/true"], "timeout_s": 60}
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["exit_code"] == 0
            times.append(time.monotonic() - began)

        for _ in range(20):
            for sandbox in probed:
                probe(sandbox, storm.before)
        with subprocess.Popen(
            [sys.executable, __file__, daemon.base_url, daemon.token, str(creates), str(wait_s)],
            stdout=subprocess.PIPE,
        ) as raging:
            assert raging.stdout is not None
            assert raging.stdout.readline() == b"begun\n"
            answers: list[bytes] = []
            reader = threading.Thread(target=lambda: answers.extend(raging.stdout or ()))
            reader.start()
            while reader.is_alive():
                for sandbox in probed:
                    probe(sandbox, storm.during)
            reader.join()
        assert raging.returncode == 0
    for status, code, retry_after, took in json.loads(b"".join(answers)):
        storm.answers.append((status, code, retry_after))
        storm.took.append(took)
    return storm


async def _ask_all(base_url: str, token: str, creates: int, wait_s: float) -> list[tuple[Any, ...]]:
    """With aiohttp: httpx's pool takes longer over hundreds of connections than the daemon does."""
    body = {"image": "busybox", "limits": SMALL, "wait_s": wait_s}
    async with aiohttp.ClientSession(
        base_url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(120),
        connector=aiohttp.TCPConnector(limit=0),
    ) as client:

        async def ask() -> tuple[Any, ...]:
            began = time.monotonic()
            async with client.post("/v1/sandboxes", json=body) as answer:
                told = await answer.json()
            took = time.monotonic() - began
            code = "" if answer.ok else told["error"]["code"]
            return answer.status, code, answer.headers.get("Retry-After"), took

        return await asyncio.gather(*(ask() for _ in range(creates)))


def percentile(times: Sequence[float], share: float) -> float:
    """Milliseconds."""
    ordered = sorted(times)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 1)


def report(storm: Storm) -> str:
    def row(name: str, times: Sequence[float]) -> str:
        middle, late = percentile(times, 0.5), percentile(times, 0.99)
        return f"{name}: {len(times)}, p50 {middle} ms, p99 {late} ms"

    return "\n".join(
        (
            f"{storm.served} served of {len(storm.answers)}",
            row("creates, answered", storm.took),
            row("execs before", storm.before),
            row("execs during", storm.during),
        )
    )


if __name__ == "__main__":
    print("begun", flush=True)
    url, secret, count, wait = sys.argv[1:]
    print(json.dumps(asyncio.run(_ask_all(url, secret, int(count), float(wait)))))
