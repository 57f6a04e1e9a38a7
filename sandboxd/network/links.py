"""A sandbox's link: the veth pair, both ends' addresses and routes, its bandwidth, by netlink.

Every sandbox has an address of its own and the same gateway, which is no neighbour of it: each end
has one route to the other through the link alone, and a fixed neighbour entry, so that nothing is
asked or believed over ARP.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address
from typing import Any, Final

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from sandboxd.linux import namespaces

INSIDE: Final = "eth0"
MTU: Final = 1500

SCOPE_LINK: Final = 253  # RT_SCOPE_LINK, linux/rtnetlink.h
NUD_PERMANENT: Final = 0x80  # linux/neighbour.h

BURST_S: Final = 0.02
BURST_LEAST_BYTES: Final = 64 * 1024
"""A segment that was not cut up yet (GSO) is as large as this, and must fit the bucket."""
LATENCY: Final = "50ms"
"""How long a packet may wait for its turn; then it is dropped, and TCP slows down."""


@contextmanager
def entered(netns_fd: int, home_fd: int) -> Iterator[None]:
    """In another network namespace; sockets made there stay there. One thread only."""
    namespaces.setns(netns_fd, namespaces.CLONE_NEWNET)
    try:
        yield
    finally:
        namespaces.setns(home_fd, namespaces.CLONE_NEWNET)


def set_sysctl(name: str, value: str) -> None:
    """Of the network namespace that the caller is in. ``name`` has slashes."""
    fd = os.open(f"/proc/sys/net/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def forbid_ipv6(which: str = "default") -> None:
    """On the links that are made from now on; nothing where the kernel has no IPv6."""
    with suppress(FileNotFoundError):
        set_sysctl(f"ipv6/conf/{which}/disable_ipv6", "1")


def add(
    router: IPRoute,
    home_fd: int,
    netns_fd: int,
    *,
    name: str,
    address: IPv4Address,
    gateway: IPv4Address,
    bandwidth_mbit: int,
) -> None:
    """Connect a sandbox: ``name`` here, ``eth0`` there. Raises OSError; nothing is left then."""
    with entered(netns_fd, home_fd):
        forbid_ipv6()
        inside = IPRoute()
    try:
        router.link(
            "add", ifname=name, kind="veth", mtu=MTU,
            peer={"ifname": INSIDE, "mtu": MTU, "net_ns_fd": netns_fd},
        )  # fmt: skip
        try:
            here, here_mac = _index(router, name)
            there, there_mac = _index(inside, INSIDE)
            _limit(router, here, bandwidth_mbit)
            _limit(inside, there, bandwidth_mbit)
            inside.link("set", index=there, state="up")
            inside.addr("add", index=there, address=str(address), prefixlen=32)
            _neighbour(inside, there, gateway, here_mac)
            inside.route("add", dst=f"{gateway}/32", oif=there, scope=SCOPE_LINK)
            inside.route("add", dst="0.0.0.0/0", gateway=str(gateway), oif=there)
            router.link("set", index=here, state="up")
            _neighbour(router, here, address, there_mac)
            router.route("add", dst=f"{address}/32", oif=here, scope=SCOPE_LINK)
        except BaseException:
            remove(router, name)
            raise
    except NetlinkError as error:
        raise OSError(error.code, os.strerror(error.code), f"link {name}") from None
    finally:
        inside.close()


def remove(router: IPRoute, name: str) -> None:
    """Both ends, with their routes and queues. One that is gone with its sandbox is removed."""
    for index in router.link_lookup(ifname=name):
        with suppress(NetlinkError):
            router.link("del", index=index)


def _index(routes: IPRoute, name: str) -> tuple[int, str]:
    (link,) = routes.link("get", ifname=name)
    return int(link["index"]), str(link.get_attr("IFLA_ADDRESS"))


def _neighbour(routes: IPRoute, index: int, address: IPv4Address, mac: str) -> None:
    routes.neigh("add", dst=str(address), lladdr=mac, ifindex=index, state=NUD_PERMANENT)


def _limit(routes: IPRoute, index: int, mbit: int) -> None:
    """What leaves through this end: from the router's it is what the sandbox receives."""
    rate = mbit * 1_000_000 // 8
    burst = max(BURST_LEAST_BYTES, int(rate * BURST_S))
    options: dict[str, Any] = {"rate": rate, "burst": burst, "latency": LATENCY}
    routes.tc("add", "tbf", index, handle="1:", parent=0xFFFF_FFFF, **options)
