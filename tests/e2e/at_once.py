"""Many requests at once, over connections of their own that are closed afterwards.

For: tests of concurrency. Not the daemon's usual client: what it kept open would count as a leak.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import httpx

from tests.framework.daemon import Daemon

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.contextmanager
def client_of(daemon: Daemon, timeout_s: float = 120) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=daemon.base_url,
        headers={"Authorization": f"Bearer {daemon.token}"},
        timeout=timeout_s,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as client:
        yield client


def at_once(call: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """`call` for each item, `threads` at a time; results in the order of the items."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, items))


@contextlib.contextmanager
def in_background(call: Callable[[], Result]) -> Iterator[Future[Result]]:
    """Run `call` beside the block; it must have ended, or end by itself, when the block does."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)
