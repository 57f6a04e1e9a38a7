"""What a service manager gives a daemon and wants of it: sockets, sd_listen_fds(3), and word of how
it is, sd_notify(3). Without one (a shell) there is nothing to take, and nothing is told.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

from sdnotify import SystemdNotifier

from sandboxd.errors import ConfigError

LISTEN_FDS_START: Final = 3
"""SD_LISTEN_FDS_START of sd-daemon.h."""


def take_listeners(env: MutableMapping[str, str]) -> list[socket.socket]:
    """The listening sockets that were passed to this very process; the environment forgets them.

    Raises ConfigError for one that is not a listening stream socket.
    """
    pid, count = env.pop("LISTEN_PID", ""), env.pop("LISTEN_FDS", "")
    env.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    return [_listener(fd) for fd in range(LISTEN_FDS_START, LISTEN_FDS_START + int(count))]


def _listener(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.type != socket.SOCK_STREAM or not listens:
        raise ConfigError(
            f"the service manager passed a socket that takes no connections (fd {fd})",
            hint="the socket unit needs ListenStream= and Accept=no",
        )
    return sock


class ServiceManager:
    """Tells it what it asked for in the environment. Whatever cannot be told is not."""

    def __init__(self, env: MutableMapping[str, str]) -> None:
        self._tell = SystemdNotifier().notify
        watchdog_us = env.get("WATCHDOG_USEC", "")
        asked = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(watchdog_us) / 1e6 if asked and watchdog_us.isdigit() else 0.0
        """How long it may hear nothing; 0 where it does not mind."""
        self._alive_at = 0.0

    def ready(self, status: str) -> None:
        self._tell(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """``ready`` ends it."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def alive(self) -> None:
        """To be called often; told three times in the time it has."""
        now = time.monotonic()
        if self.watchdog_s and now - self._alive_at >= self.watchdog_s / 3:
            self._alive_at = now
            self._tell("WATCHDOG=1")
