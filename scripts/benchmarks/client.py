"""Requests a second of the asyncio client beside raw aiohttp's, to the same server in the same run.

For: seeing what the client's own work takes from a rollout worker that runs hundreds of commands at
once. The server answers every exec alike, from a process of its own; no sandbox is there. Rounds of
both are interleaved, so that a slower moment of the machine hits both; the processor time that a
request takes here says the same on a machine on which others work too. Not for: how fast a sandbox
is (the scenarios).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from rich.console import Console
from rich.table import Table

from sandboxd.client import AsyncClient, AsyncSandbox, SandboxInfo

CONNECTIONS = (1, 8, 32, 128)
ROUND_S = 1.5
PATH = "/v1/sandboxes/sb-bench/exec"
BODY = {"command": ["/bin/true"], "timeout_s": 10, "encoding": "base64"}
RESULT = {
    "exit_code": 0,
    "signal": None,
    "timed_out": False,
    "timeout_reason": None,
    "oom_killed": False,
    "stdout": "",
    "stderr": "",
    "encoding": "base64",
    "stdout_total_bytes": 0,
    "stderr_total_bytes": 0,
    "stdout_truncated": False,
    "stderr_truncated": False,
    "wall_s": 0.001,
    "cpu_user_s": 0.0,
    "cpu_system_s": 0.001,
    "peak_memory_bytes": 1 << 20,
}
SANDBOX = {
    "id": "sb-bench",
    "state": "running",
    "limits": {},
    "created_at": "2025-01-01T00:00:00Z",
    "expires_at": "2025-01-01T01:00:00Z",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench --client", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each, at each concurrency")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    with server() as url:
        figures = asyncio.run(measure(url, options.rounds))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    table = Table("connections", "client /s", "raw aiohttp /s", "ratio", title="requests a second")
    for name in ("client", "aiohttp"):
        table.add_column(f"{name}: CPU µs", justify="right")
    for row in figures:
        counts = (str(row["connections"]), f"{row['client']:.0f}", f"{row['aiohttp']:.0f}")
        costs = (f"{row['client_cpu_us']:.0f}", f"{row['aiohttp_cpu_us']:.0f}")
        table.add_row(*counts, f"{row['ratio']:.2f}", *costs)
    Console().print(table)
    return 0


async def measure(url: str, rounds: int) -> list[dict[str, Any]]:
    figures = []
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        AsyncClient(url, "bench") as client,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        sandbox = AsyncSandbox(client, SandboxInfo.from_json(SANDBOX))

        async def ours() -> None:
            result = await sandbox.exec(["/bin/true"], timeout_s=10)
            assert result.exit_code == 0

        async def theirs() -> None:
            headers = {"Authorization": "Bearer bench"}
            async with session.post(url + PATH, json=BODY, headers=headers) as answer:
                assert (await answer.json())["exit_code"] == 0

        for connections in CONNECTIONS:
            found: dict[str, list[tuple[float, float]]] = {"client": [], "aiohttp": []}
            for _ in range(rounds):
                found["client"].append(await rate(ours, connections))
                found["aiohttp"].append(await rate(theirs, connections))
            row: dict[str, Any] = {"connections": connections}
            for name, samples in found.items():
                row[name] = statistics.median(per_s for per_s, _ in samples)
                row[f"{name}_cpu_us"] = statistics.median(cpu_us for _, cpu_us in samples)
            pairs = zip(found["client"], found["aiohttp"], strict=True)
            row["ratio"] = statistics.median(mine[0] / raw[0] for mine, raw in pairs)
            figures.append(row)
    return figures


async def rate(request: Callable[[], Awaitable[None]], at_once: int) -> tuple[float, float]:
    """Requests a second with so many under way all the time, and this process's processor time for
    each in microseconds."""
    count = 0
    gc.collect()
    began, began_cpu = time.perf_counter(), time.process_time()

    async def worker() -> None:
        nonlocal count
        while time.perf_counter() - began < ROUND_S:
            await request()
            count += 1

    await asyncio.gather(*(worker() for _ in range(at_once)))
    cpu_us = (time.process_time() - began_cpu) / count * 1e6
    return count / (time.perf_counter() - began), cpu_us


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A FastAPI server in a process of its own."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        process = multiprocessing.get_context("fork").Process(target=serve, args=(listener,))
        process.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            process.join(10)
            process.kill()
            process.join()


def serve(listener: socket.socket) -> None:
    app = FastAPI()

    @app.post(PATH)
    async def execute(request: Request) -> Response:
        await request.body()
        return Response(json.dumps(RESULT), media_type="application/json")

    config = uvicorn.Config(
        app, log_config=None, access_log=False, loop="uvloop", http="httptools", lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listener])
