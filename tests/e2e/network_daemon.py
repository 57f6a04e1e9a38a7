"""A daemon with a network to give, on a host and an internet of the tests' own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.framework import host_state, internet
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.internet import Internet
from tests.framework.leaks import LeakCheck
from tests.framework.networks import egress

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
    raise AssertionError(f"no {module} in {host_state.process_table().keys()}")
