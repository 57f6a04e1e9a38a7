"""What tests of the network do in a sandbox: connect, ask for a name, read the log.

The busybox image's own programs do it: what a test sees is what any program in a sandbox sees.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.framework import internet, times
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.internet import Internet
from tests.framework.leaks import LeakCheck

LOG_S = times.scaled(10.0)
"""The kernel hands over what it logs within 50 ms; more than that is for a machine that is busy."""


SETTINGS = {"SANDBOXD_DNS_UPSTREAMS": internet.DNS, "SANDBOXD_ALLOW_FULL_NETWORK": "true"}


@contextlib.contextmanager
def networked_daemon(world: Internet, check: LeakCheck, image: Path) -> Iterator[Daemon]:
    """With its router and resolver running, as they do from the first network on."""
    with running_daemon(check, {"busybox": image}, (), SETTINGS, world.enter) as daemon:
        daemon.warm_up("busybox")
        with daemon.sandbox("busybox", network={"allow": []}) as box:
            egress(daemon, box)  # the resolver's to answer, and so shows that it is there
        pids = {pid for pid in daemon.refresh_family() if pid not in check.daemon_pids}
        with check.long_lived(pids, set()):
            yield daemon


def part_of(daemon: Daemon, module: str) -> int:
    """The pid of ``python -m sandboxd.network.MODULE`` of a daemon."""
    for pid in daemon.refresh_family():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if f"sandboxd.network.{module}".encode() in words:
            return pid
    raise AssertionError(f"the daemon has no {module}")


def tcp(daemon: Daemon, box: str, address: str, port: int = 80, **request: Any) -> str:
    """What the server at an address says, ``address:port``; "" where it was not reached."""
    script = f"nc -w 3 {address} {port} </dev/null"
    said = str(daemon.exec(box, script, timeout_s=times.scaled(20), **request)["stdout"])
    return said.splitlines()[0] if said else ""


def lookup(
    daemon: Daemon, box: str, name: str, kind: str = "a", server: str | None = None
) -> list[str]:
    """The addresses of a name as DNS gives them to the sandbox, in order; with ``server``, what a
    server on the internet says, over UDP."""
    words = ["nslookup", f"-type={kind}", name, *([server] if server else [])]
    said = daemon.exec(box, words, timeout_s=times.scaled(30))["stdout"]
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
