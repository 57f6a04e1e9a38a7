"""hostd's part of the sandboxes' network: two processes, started when a sandbox first wants one.

The router starts as root, since the uplink is the host's, and gives it up; the resolver has an id
of its own that no user namespace maps. Both hang on a socket of which hostd has the other end. The
launcher is given a socket to each, and asks for new ones when either has died.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sandboxd.host.ids import NODE_ID, NodeIds
from sandboxd.linux import namespaces
from sandboxd.linux.nftables import SONAME, Nftables
from sandboxd.network import uplink

Spawn = Callable[[str, Sequence[str], Sequence[int]], int]
"""Starts a process by name, arguments and fds (3, 4, …); returns its pid."""

ROUTER: Final = "router"
RESOLVER: Final = "resolver"


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    pool: str = ""
    """Addresses of the sandboxes; none has a network if it is empty."""
    upstreams: str = ""
    """DNS servers; those of the host's resolv.conf if empty."""


class HostNetwork:
    def __init__(self, settings: NetworkSettings, ids: NodeIds, cgroup_name: str) -> None:
        self._settings = settings
        self._ids = ids
        self._instance = uplink.instance_of(cgroup_name)
        self._lifelines: list[socket.socket] = []

    def start(self, launcher_pid: int, spawn: Spawn) -> tuple[int, int]:
        """Start both; the fds of sockets to router and resolver, the caller's to pass on.

        Raises OSError: EOPNOTSUPP where this node gives no network, and its text says why.
        """
        if why := refusal(self._settings):
            raise OSError(95, why, "network")
        self.stop()
        user = namespaces.open_namespace(launcher_pid, "user")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(5)]
        router_life, resolver_life, to_router, to_resolver, between = pairs
        try:
            spawn(
                ROUTER,
                [
                    *(sys.executable, "-m", "sandboxd.network.router"),
                    *("--instance", self._instance, "--pool", self._settings.pool),
                    *("--node-id", str(NODE_ID)),
                ],
                [s.fileno() for s in (router_life[1], to_router[1], between[0])] + [user],
            )
            spawn(
                RESOLVER,
                [
                    *(sys.executable, "-m", "sandboxd.network.resolver"),
                    *("--id", str(self._ids.resolver), "--upstreams", self._settings.upstreams),
                ],
                [s.fileno() for s in (resolver_life[1], to_resolver[1], between[1])],
            )
            self._lifelines = [router_life[0], resolver_life[0]]
            return to_router[0].detach(), to_resolver[0].detach()
        finally:
            os.close(user)
            for ours, theirs in pairs:
                theirs.close()
                if ours not in self._lifelines:
                    ours.close()

    def netns(self, pid: int, pidfd: int) -> int:
        """A sandbox's network namespace. PID 1 is not dumpable, so that only root may open it.

        ``pidfd`` is the launcher's of the same process: that it lives afterwards shows that ``pid``
        was no other's meanwhile. Raises PermissionError for what is no PID 1 of this node.
        """
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            uids = next(line.split()[1:] for line in file if line.startswith("Uid:"))
        if set(uids) != {str(self._ids.node)}:
            raise PermissionError(1, "no process of this node", f"pid {pid}")
        fd = namespaces.open_namespace(pid, "net")
        if _ended(pidfd) or _pid_of(pidfd) != pid:
            os.close(fd)
            raise ProcessLookupError(3, "it has ended", f"pid {pid}")
        return fd

    def stop(self) -> None:
        """Tell both to end, and take what is ours from the host. Idempotent."""
        for sock in self._lifelines:
            sock.close()
        self._lifelines = []
        if self._settings.pool:
            uplink.remove_table(self._instance)


def refusal(settings: NetworkSettings) -> str:
    """Why this node gives no network, or ""."""
    if not settings.pool:
        return "network_pool is empty"
    try:
        Nftables().close()
    except FileNotFoundError:
        return f"{SONAME} is missing; apt-get install nftables"
    if not uplink.forwards():
        return "this host does not forward packets: net.ipv4.ip_forward is 0"
    return ""


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("Pid:")), 0)


def _ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
