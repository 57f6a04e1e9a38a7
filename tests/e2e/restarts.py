"""Starting a daemon again where another one has ended, however it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx

from tests.framework.daemon import Daemon, free_port, start


@contextlib.contextmanager
def started_again(
    daemon: Daemon, environment: dict[str, str] | None = None, address: str = "127.0.0.1"
) -> Iterator[Daemon]:
    """A daemon with the directories of `daemon`, ready; stopped at the end."""
    port = free_port()
    again = start(daemon.state_dir.parent, ("--listen", f"{address}:{port}"), environment)
    again.http.close()
    again.base_url = f"http://127.0.0.1:{port}"
    again.http = httpx.Client(base_url=again.base_url, timeout=120)
    try:
        again.wait_ready()
        yield again
    finally:
        again.stop()
