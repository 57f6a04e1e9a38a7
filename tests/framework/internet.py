"""A host and an internet of the tests' own: two network namespaces, with servers in the second.

::

    the daemon's namespace ("host")              "internet"
    203.0.113.2 ── wan ───────────── lan ── 203.0.113.1, and every address of ADDRESSES
                                             TCP on PORTS: says to which address it was connected
                                             DNS at DNS: what ``names`` holds

So that a daemon can give sandboxes a network while the machine's own is left alone. For: e2e and
security tests of the network. Nothing has a name on the machine: it is gone with two processes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.framework import times

HOST = "203.0.113.2"
DNS = "198.51.100.53"
GOOD = "198.51.100.10"
OTHER = "198.51.100.11"
EVIL = "198.51.100.66"
METADATA = "169.254.169.254"
PRIVATE = ("10.9.8.7", "172.16.5.5", "192.168.7.7", "100.64.3.3", "198.18.0.9")
METADATA_ALL = (METADATA, "100.100.100.200", "168.63.129.16")
ADDRESSES = (DNS, GOOD, OTHER, EVIL, *METADATA_ALL, *PRIVATE)
PORTS = (80, 443, 5432)

NAMES: dict[str, list[str]] = {
    "example.org": [GOOD],
    "www.example.org": [OTHER],
    "deep.www.example.org": [OTHER],
    "evil.test": [EVIL],
    "rebind.test": [METADATA, PRIVATE[0], "127.0.0.1", GOOD],
    "inside.test": [PRIVATE[0]],
    "many.test": [f"198.51.100.{n}" for n in range(100, 200)],
}


@dataclass
class Internet:
    """Both namespaces, by a process that is in each; ``queries`` tells what its DNS was asked."""

    host_pid: int
    internet_pid: int
    _server: subprocess.Popen[bytes] = field(repr=False)

    @property
    def enter(self) -> list[str]:
        """The words before a command that is to run on the host."""
        return ["nsenter", f"--net=/proc/{self.host_pid}/ns/net", "--"]

    def on_host(self, *command: str) -> str:
        done = subprocess.run(
            [*self.enter, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=times.scaled(30),
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def forward(self, on: bool) -> bool:
        """Whether it did before."""
        name = "net.ipv4.ip_forward"
        before = self.on_host("sysctl", "-n", name).strip() == "1"
        self.on_host("sysctl", "-q", "-w", f"{name}={int(on)}")
        return before

    def queries(self) -> list[str]:
        """Names that the DNS server was asked since the last call."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(b"queries\n")
        self._server.stdin.flush()
        asked: list[str] = json.loads(self._server.stdout.readline())
        return asked

    def links(self) -> list[str]:
        """The names of the host's links."""
        return sorted(one["ifname"] for one in self._json("ip", "-j", "link"))

    def tables(self) -> list[str]:
        listed = self._json("nft", "-j", "list", "tables")["nftables"]
        return sorted(one["table"]["name"] for one in listed if "table" in one)

    def routes(self) -> list[str]:
        return sorted(self.on_host("ip", "route").splitlines())

    def _json(self, *command: str) -> Any:
        return json.loads(self.on_host(*command))


@contextlib.contextmanager
def running(host_pid: int | None = None) -> Iterator[Internet]:
    """``host_pid``: a process whose network namespace is to be the host, for a machine that is
    there for tests alone; it is left as it was."""
    with contextlib.ExitStack() as stack:
        host = host_pid or stack.enter_context(_namespace())
        internet = stack.enter_context(_namespace())
        for pid, lines in (
            (
                host,
                [
                    "link set lo up",
                    f"link add wan type veth peer name lan netns {internet}",
                    f"addr add {HOST}/24 dev wan",
                    "link set wan up",
                    "route add default via 203.0.113.1",
                ],
            ),
            (
                internet,
                [
                    "link set lo up",
                    "addr add 203.0.113.1/24 dev lan",
                    "link set lan up",
                    *(f"addr add {address}/32 dev lo" for address in (*ADDRESSES, *_of_many())),
                ],
            ),
        ):
            _ip(pid, lines)
        # A link is up a moment after it was told to be; nothing is sent before that.
        server = stack.enter_context(_server(internet))
        found = Internet(host, internet, server)
        stack.callback(found.forward, found.forward(True))
        yield found


def _of_many() -> list[str]:
    return NAMES["many.test"]


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A process in a network namespace of its own; its pid."""
    with subprocess.Popen(
        ["unshare", "--net", "--", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the namespace is there now
        try:
            yield process.pid
        finally:
            process.kill()


def _ip(pid: int, lines: list[str]) -> None:
    subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "--", "ip", "-batch", "-"],
        input="\n".join(lines).encode(),
        check=True,
        timeout=times.scaled(30),
    )


@contextlib.contextmanager
def _server(pid: int) -> Iterator[subprocess.Popen[bytes]]:
    program = Path(__file__).with_name("internet_server.py")
    config = {"tcp": PORTS, "addresses": ADDRESSES, "dns": DNS, "names": NAMES}
    with subprocess.Popen(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "--", sys.executable, program, json.dumps(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the internet's servers did not start"
        try:
            yield process
        finally:
            process.kill()
