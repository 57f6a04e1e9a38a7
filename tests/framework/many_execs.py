"""Very many commands at once whose bytes and codes can be told beforehand.

For: the e2e tier in a small form, the load tier in full. Every command's output, error and exit
code follow from its number alone, so a byte that is lost or another command's, or a wrong code, is
seen. Kinds take turns: plain, with stdin, streamed, ended by a signal, with much output, as text.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sandboxd.client import AsyncClient, AsyncSandbox
from tests.framework.daemon import Daemon

SMALL = {"memory_mb": 64, "disk_mb": 16, "pids": 64}
TIMEOUT_S = 300.0
Found = tuple[int, bytes, bytes]
"""Exit code, stdout, stderr."""

SCRIPT = 'echo "out $0"; echo "err $0" >&2; exit $1'
LINES = 'i=0; while [ $i -lt $1 ]; do echo "$0.$i"; i=$((i+1)); done; exit $2'


@dataclass(frozen=True)
class Figures:
    sandboxes: int
    at_once: int
    execs: int
    seconds: float
    wrong: list[str]

    @property
    def per_s(self) -> float:
        return self.execs / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.execs} execs over {self.sandboxes} sandboxes, {self.at_once} at once:"
            f" {self.seconds:.1f} s, {self.per_s:.0f}/s, {len(self.wrong)} wrong"
        )


def bytes_of(number: int, size: int) -> bytes:
    """Bytes of all values, other ones for each number."""
    return hashlib.shake_128(str(number).encode()).digest(size)


async def _plain(box: AsyncSandbox, n: int) -> tuple[Found, Found]:
    words = ["sh", "-c", SCRIPT, str(n), str(n % 125)]
    done = await box.exec(words, timeout_s=TIMEOUT_S)
    expected = (n % 125, f"out {n}\n".encode(), f"err {n}\n".encode())
    return (done.exit_code, done.stdout_bytes, done.stderr_bytes), expected


async def _echo(box: AsyncSandbox, n: int) -> tuple[Found, Found]:
    data = bytes_of(n, n % 9000)
    done = await box.exec(["cat"], stdin=data, timeout_s=TIMEOUT_S)
    return (done.exit_code, done.stdout_bytes, done.stderr_bytes), (0, data, b"")


async def _streamed(box: AsyncSandbox, n: int) -> tuple[Found, Found]:
    told = {"stdout": b"", "stderr": b""}
    words = ["sh", "-c", LINES, str(n), str(n % 41), str(n % 7)]
    async with box.exec_stream(words, timeout_s=TIMEOUT_S) as stream:
        async for output in stream:
            told[output.stream] += output.data
        end = await stream.exit()
    lines = "".join(f"{n}.{i}\n" for i in range(n % 41)).encode()
    return (end.exit_code, told["stdout"], told["stderr"]), (n % 7, lines, b"")


async def _signalled(box: AsyncSandbox, n: int) -> tuple[Found, Found]:
    number = (1, 2, 9, 15)[n % 4]
    words = ["sh", "-c", f"echo {n}; kill -{number} $$; echo never"]
    done = await box.exec(words, timeout_s=TIMEOUT_S)
    expected = (128 + number, f"{n}\n".encode(), b"")
    return (done.exit_code, done.stdout_bytes, done.stderr_bytes), expected


async def _much(box: AsyncSandbox, n: int) -> tuple[Found, Found]:
    count = 2000 + n % 20_000  # more than a pipe holds, at times
    done = await box.exec(["seq", str(n), str(n + count - 1)], timeout_s=TIMEOUT_S)
    expected = "".join(f"{i}\n" for i in range(n, n + count)).encode()
    return (done.exit_code, done.stdout_bytes, done.stderr_bytes), (0, expected, b"")


KINDS: tuple[Callable[[AsyncSandbox, int], Awaitable[tuple[Found, Found]]], ...] = (
    *(_plain, _plain, _echo, _plain, _streamed),
    *(_plain, _echo, _plain, _signalled, _plain),
    *(_plain, _much, _plain, _echo, _streamed),
)


def many_execs(daemon: Daemon, *, sandboxes: int, at_once: int, execs: int) -> Figures:
    """Run them; the sandboxes are gone afterwards. One connection that hangs fails the whole: no
    answer may take longer than a command's own time and its margin (``AnswerTimeout``)."""
    return asyncio.run(_run(daemon, sandboxes, at_once, execs))


async def _run(daemon: Daemon, sandboxes: int, at_once: int, execs: int) -> Figures:
    wrong: list[str] = []
    numbers = iter(range(execs))
    async with AsyncClient(daemon.base_url, daemon.token, retry_s=120) as client:
        made = await client.create_many("busybox", sandboxes, run="many-execs", limits=SMALL)
        boxes = [box for box in made if isinstance(box, AsyncSandbox)]
        assert len(boxes) == sandboxes, [one for one in made if isinstance(one, Exception)][:3]

        async def worker() -> None:
            for n in numbers:
                box = boxes[n % sandboxes]
                found, expected = await KINDS[n % len(KINDS)](box, n)
                if found != expected:
                    wrong.append(f"{n} ({KINDS[n % len(KINDS)].__name__}): {_short(found)}")

        began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(worker())
        finally:
            seconds = time.perf_counter() - began
            told = await client.delete_many(run="many-execs", within_s=300)
        assert not told.failed
        assert not told.pending
        assert len(told.deleted) == sandboxes
    return Figures(sandboxes, at_once, execs, seconds, wrong)


def _short(found: Found) -> str:
    return f"{found[0]}, {found[1][:60]!r}, {found[2][:60]!r}"
