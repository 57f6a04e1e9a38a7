"""The router's way to the host's network, and all that is added to the host for it.

A veth pair between the two namespaces, and one nftables table of ours. The table only ever takes
away (a chain that accepts says nothing for other tables), but for masquerading. Run as root of the
host, once when the router starts; the link goes with the router's namespace, the table with
``remove_table``, at the end of hostd and before the next begin.
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Final

from sandboxd.linux.nftables import Nftables, NftError
from sandboxd.network.ruleset import UPLINK, Plan

FORWARDING: Final = "/proc/sys/net/ipv4/ip_forward"


def instance_of(cgroup_name: str) -> str:
    """What tells one node's link and table from another's on the same host."""
    return hashlib.sha256(cgroup_name.encode()).hexdigest()[:8]


def link_name(instance: str) -> str:
    return f"sbx{instance}"


def table_name(instance: str) -> str:
    return f"sandboxd_{instance}"


def forwards() -> bool:
    """Whether this network namespace passes packets on at all."""
    with open(FORWARDING, encoding="ascii") as file:
        return file.read().strip() == "1"


def forward_policy() -> str:
    """The table of somebody else's that drops what it has no rule for, or "": then nothing that a
    sandbox sends comes through unless that table says so."""
    with Nftables() as nft:
        for one in nft.listed("list chains"):
            chain = one.get("chain", {})
            if chain.get("hook") == "forward" and chain.get("policy") == "drop":
                return f"{chain['family']} {chain['table']}"
    return ""


def has_table(instance: str) -> bool:
    """Whether the host has this node's. One without nftables has none, nor has an ordinary user's:
    asked by him, the library would say on stderr that he must be root."""
    if os.geteuid() != 0:
        return False
    with suppress(FileNotFoundError, NftError), Nftables() as nft:
        tables = [one.get("table", {}) for one in nft.listed("list tables inet")]
        return any(table.get("name") == table_name(instance) for table in tables)
    return False


def remove_table(instance: str) -> None:
    """Take away what is left of this node on the host. Nothing there is fine: the node may serve
    without a network."""
    if has_table(instance):
        with suppress(NftError), Nftables() as nft:
            nft.run(f"delete table inet {table_name(instance)}")


def has_link(instance: str) -> bool:
    with suppress(OSError):
        return socket.if_nametoindex(link_name(instance)) > 0
    return False


def remove_link(instance: str) -> None:
    """Should what holds the router's namespace not be ours. Not being there is no error."""
    from pyroute2 import IPRoute  # noqa: PLC0415 - see ``add``

    with IPRoute() as host:
        _remove_link(host, link_name(instance))


def _remove_link(host: Any, name: str) -> None:
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415

    for index in host.link_lookup(ifname=name):
        with suppress(NetlinkError):
            host.link("del", index=index)


def add(instance: str, plan: Plan, router_pid: int) -> IPv4Network:
    """Connect the router's namespace; returns the four addresses used: the second is the host's,
    the third the router's. Raises OSError."""
    from pyroute2 import IPRoute  # noqa: PLC0415 - hostd, which removes tables, has no use for it
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415

    name = link_name(instance)
    remove_table(instance)
    netns = os.open(f"/proc/{router_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with IPRoute() as host:
            _remove_link(host, name)  # of a router that is being torn down
            network = _free(host, instance, plan)
            _add_table(instance, network)
            host.link("add", ifname=name, kind="veth", peer={"ifname": UPLINK, "net_ns_fd": netns})
            with (
                suppress(FileNotFoundError),
                open(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "w", encoding="ascii") as file,
            ):
                file.write("1")
            (index,) = host.link_lookup(ifname=name)
            host.addr("add", index=index, address=str(network[1]), prefixlen=30)
            host.link("set", index=index, state="up")
    except NetlinkError as error:
        raise OSError(error.code, os.strerror(error.code), f"link {name}") from None
    finally:
        os.close(netns)
    return network


def _free(host: Any, instance: str, plan: Plan) -> IPv4Network:
    """The first of the plan's that the host has no address in, from a place of the node's own: two
    nodes that start at once then do not take the same."""
    used = [IPv4Address(one.get_attr("IFA_ADDRESS")) for one in host.get_addr(family=2)]
    networks = plan.uplinks
    start = int(instance, 16) % len(networks)
    for network in networks[start:] + networks[:start]:
        if not any(address in network for address in used):
            return network
    raise OSError(98, "every network for an uplink is in use", str(plan.pool))


def _add_table(instance: str, network: IPv4Network) -> None:
    link, router = link_name(instance), network[2]
    with Nftables() as nft:
        nft.run(f"""
add table inet {table_name(instance)}
table inet {table_name(instance)} {{
    chain prerouting {{
        type filter hook prerouting priority raw;
        iifname "{link}" ip saddr != {router} drop
        iifname "{link}" meta nfproto != ipv4 drop
    }}
    chain input {{
        type filter hook input priority filter - 10;
        iifname "{link}" reject with icmpx admin-prohibited
    }}
    chain forward {{
        type filter hook forward priority filter - 10;
        iifname "{link}" ct state invalid drop
        oifname "{link}" ct state established,related accept
        oifname "{link}" drop
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat;
        ip saddr {router} oifname != "{link}" masquerade
    }}
}}
""")
