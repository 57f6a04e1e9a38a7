"""What tests of the network do in a sandbox: connect, ask for a name, read the log.

The busybox image's own programs do it: what a test sees is what any program in a sandbox sees.
"""

from __future__ import annotations

import time
from typing import Any

from tests.framework.daemon import Daemon

LOG_S = 10.0
"""The kernel hands over what it logs within 50 ms; more than that is for a machine that is busy."""


def tcp(daemon: Daemon, box: str, address: str, port: int = 80, **request: Any) -> str:
    """What the server at an address says, ``address:port``; "" where it was not reached."""
    script = f"nc -w 3 {address} {port} </dev/null"
    said = str(daemon.exec(box, script, timeout_s=20, **request)["stdout"])
    return said.splitlines()[0] if said else ""


def lookup(
    daemon: Daemon, box: str, name: str, kind: str = "a", server: str | None = None
) -> list[str]:
    """The addresses of a name as DNS gives them to the sandbox, in order; with ``server``, what a
    server on the internet says, over UDP."""
    words = ["nslookup", f"-type={kind}", name, *([server] if server else [])]
    said = daemon.exec(box, words, timeout_s=30)["stdout"]
    _, _, answer = said.partition("\n\n")
    return sorted(
        line.partition(": ")[2].strip()
        for line in answer.splitlines()
        if line.startswith("Address:")
    )


def egress(daemon: Daemon, box: str) -> list[dict[str, Any]]:
    answer = daemon.http.get(f"/v1/sandboxes/{box}/egress")
    assert answer.status_code == 200, answer.text
    entries: list[dict[str, Any]] = answer.json()["entries"]
    return entries


def logged(daemon: Daemon, box: str, **wanted: Any) -> dict[str, Any]:
    """The entry of a sandbox's log with these fields, once it is there."""
    deadline = time.monotonic() + LOG_S
    while True:
        entries = egress(daemon, box)
        for entry in entries:
            if all(entry[name] == value for name, value in wanted.items()):
                return entry
        assert time.monotonic() < deadline, f"no {wanted} in {entries}"
        time.sleep(0.02)
