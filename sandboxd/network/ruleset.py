"""The router's rules, as nftables commands.

One table. What a sandbox may reach is its own chain ``sN`` with its own sets, N being the number of
its link, which is never used twice; all it may not is the end of that chain. Order in the chain:

  1. addresses that are nobody's, and the pool: other sandboxes, but for members of its run's
     network. Before anything else: what was between two addresses does not outlive their holders;
  2. packets of connections that this very link began (their mark is N): an address that is used
     again inherits none of its former holder's;
  3. how many connections it may have: the table of connections is shared;
  4. members of its run; entries *within* closed ranges; addresses that the resolver has given it,
     each a name's that may lead there; closed ranges; all other entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, collapse_addresses
from typing import Final

from sandboxd.network.policy import METADATA, NEVER, PRIVATE, Policy, Ports

TABLE: Final = "inet router"
UPLINK: Final = "up"
LOG_GROUP: Final = 1
ALLOWED: Final = "allow"
DENIED: Final = "deny"
"""Prefixes of what is logged."""

LOGGED_PER_SECOND: Final = 50
LOGGED_BURST: Final = 200
"""Of one sandbox, of either kind; the rest is not logged."""

CONNECTIONS_MAX: Final = 2048
"""Of one sandbox at once."""
NEW_PER_SECOND: Final = 1000
"""Packets that begin a connection, allowed or not; the rest is dropped without an answer."""

DNS_PER_SECOND: Final = 200
"""Packets to the resolver; it has a tighter limit, which this keeps from costing it anything."""
DNS_CONNECTIONS_MAX: Final = 16
"""To the resolver, over TCP."""

_DNS_METER: Final = f"limit rate over {DNS_PER_SECOND}/second burst {DNS_PER_SECOND} packets"
_METER: Final = f"limit rate over {NEW_PER_SECOND}/second burst {NEW_PER_SECOND} packets"

ADDRESSES_MAX: Final = 1024
"""That one sandbox was given by the resolver and that have not timed out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The addresses of a router, from its pool."""

    pool: IPv4Network

    @property
    def gateway(self) -> IPv4Address:
        """What every sandbox has as its router and its name server."""
        return self.pool[4]

    @property
    def first(self) -> int:
        """The first of the sandboxes' addresses, and below ``last``, as offsets in the pool."""
        return 8

    @property
    def last(self) -> int:
        return self.pool.num_addresses - 256

    @property
    def uplinks(self) -> list[IPv4Network]:
        """What the links to the host may take: of the last 256 addresses, four each."""
        return list(IPv4Network((self.pool[self.last], 24)).subnets(new_prefix=30))


def base(plan: Plan) -> str:
    """The table without any sandbox."""
    logged = f"limit rate {LOGGED_PER_SECOND}/second burst {LOGGED_BURST} packets"
    return f"""
add table {TABLE}
table {TABLE} {{
    set never {{ type ipv4_addr; flags interval; auto-merge
        elements = {{ {_list([*NEVER, plan.pool])} }} }}
    set private {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {_list(PRIVATE)} }} }}
    set metadata {{ type ipv4_addr; flags interval; elements = {{ {_list(METADATA)} }} }}
    set links {{ type ifname . ipv4_addr; }}
    map chains {{ type ifname : verdict; }}
    set connections {{ type ipv4_addr; flags dynamic; size 65536; }}
    set dns_connections {{ type ipv4_addr; flags dynamic; size 65536; }}
    set asked {{ type ipv4_addr; flags dynamic,timeout; timeout 10s; size 65536; }}
    set begun {{ type ipv4_addr; flags dynamic,timeout; timeout 10s; size 65536; }}
    set logged_allowed {{ type ipv4_addr; flags dynamic,timeout; timeout 10s; size 65536; }}
    set logged_denied {{ type ipv4_addr; flags dynamic,timeout; timeout 10s; size 65536; }}

    chain prerouting {{
        type filter hook prerouting priority raw; policy drop;
        iifname {{ "{UPLINK}", "lo" }} accept
        iifname . ip saddr != @links drop
        ip hdrlength != 5 drop
        ip daddr {plan.gateway} udp dport 53 notrack accept
        accept
    }}
    chain output {{
        type filter hook output priority raw;
        ip saddr {plan.gateway} udp sport 53 notrack
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname "lo" accept
        iifname "{UPLINK}" drop
        update @asked {{ ip saddr {_DNS_METER} }} drop
        ip daddr {plan.gateway} udp dport 53 accept
        ip daddr {plan.gateway} tcp dport 53 ct state established accept
        add @dns_connections {{ ip saddr ct count over {DNS_CONNECTIONS_MAX} }} drop
        ip daddr {plan.gateway} tcp dport 53 accept
        jump denied
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        iifname "{UPLINK}" ct state established,related accept
        iifname "{UPLINK}" drop
        ct state invalid drop
        iifname vmap @chains
    }}
    chain allowed {{
        update @logged_allowed {{ ip saddr {logged} }} log prefix "{ALLOWED}" group {LOG_GROUP}
        accept
    }}
    chain denied {{
        update @begun {{ ip saddr {_METER} }} drop
        update @logged_denied {{ ip saddr {logged} }} log prefix "{DENIED}" group {LOG_GROUP}
        meta l4proto tcp reject with tcp reset
        reject with icmpx admin-prohibited
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat;
        oifname "{UPLINK}" masquerade
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class Link:
    """One sandbox's way in: number, address, what it may reach, and its run's number or None."""

    number: int
    address: IPv4Address
    policy: Policy
    group: int | None = None

    @property
    def name(self) -> str:
        """Of its veth in the router's namespace."""
        return f"s{self.number}"


def add_link(link: Link) -> str:
    n = link.number
    lines = [f"add chain {TABLE} s{n}"]

    def rule(text: str) -> None:
        lines.append(f"add rule {TABLE} s{n} {text}")

    if link.group is None:
        rule("ip daddr @never goto denied")
    else:
        rule(f"ip daddr @g{link.group} ct state established,related accept")
        rule(f"ip daddr @never ip daddr != @g{link.group} goto denied")
    rule(f"ct state established,related ct mark {n} accept")
    rule(f"update @begun {{ ip saddr {_METER} }} drop")
    rule(f"ct mark set {n}")
    rule(f"add @connections {{ ip saddr ct count over {CONNECTIONS_MAX} }} goto denied")
    if link.group is not None:
        rule(f"ip daddr @g{link.group} goto allowed")
    if link.policy.full:
        rule("ip daddr @metadata goto denied")
        rule("goto allowed")
    else:
        for text in _networks(link.policy, within_private=True):
            rule(text)
        for index, ports in enumerate(ports_of_names(link.policy)):
            lines.append(
                f"add set {TABLE} d{n}_{index} {{ type ipv4_addr; flags timeout;"
                f" size {ADDRESSES_MAX}; }}"
            )
            rule(f"ip daddr @d{n}_{index} {_port_match(ports)} goto allowed")
        rule("ip daddr @private goto denied")
        for text in _networks(link.policy, within_private=False):
            rule(text)
        rule("goto denied")
    lines.append(f'add element {TABLE} links {{ "{link.name}" . {link.address} }}')
    lines.append(f'add element {TABLE} chains {{ "{link.name}" : jump s{n} }}')
    if link.group is not None:
        lines.append(f"add element {TABLE} g{link.group} {{ {link.address} }}")
    return "\n".join(lines)


def remove_link(link: Link) -> str:
    n = link.number
    lines = [
        f'delete element {TABLE} chains {{ "{link.name}" }}',
        f'delete element {TABLE} links {{ "{link.name}" . {link.address} }}',
    ]
    if link.group is not None:
        lines.append(f"delete element {TABLE} g{link.group} {{ {link.address} }}")
    lines += [f"flush chain {TABLE} s{n}", f"delete chain {TABLE} s{n}"]
    if not link.policy.full:
        for index, _ in enumerate(ports_of_names(link.policy)):
            lines.append(f"delete set {TABLE} d{n}_{index}")
    return "\n".join(lines)


def add_group(number: int) -> str:
    return f"add set {TABLE} g{number} {{ type ipv4_addr; }}"


def remove_group(number: int) -> str:
    return f"delete set {TABLE} g{number}"


def open_addresses(
    link: Link, addresses: Iterable[IPv4Address], ports: Iterable[Ports], timeout_s: int
) -> str:
    """Open addresses to a link for so long, at ports that its entries of names have. One that is
    open already is open from now on: adding, deleting and adding again is how one transaction
    renews a timeout."""
    plain = ", ".join(map(str, addresses))
    timed = ", ".join(f"{one} timeout {timeout_s}s" for one in plain.split(", "))
    known = ports_of_names(link.policy)
    lines = []
    for one in ports:
        there = f"{TABLE} d{link.number}_{known.index(one)}"
        lines.append(f"add element {there} {{ {timed} }}")
        lines.append(f"delete element {there} {{ {plain} }}")
        lines.append(f"add element {there} {{ {timed} }}")
    return "\n".join(lines)


def ports_of_names(policy: Policy) -> list[Ports]:
    """Every range of ports that an entry of a name has; the resolver's addresses are kept in one
    set for each."""
    found: list[Ports] = []
    for entry in policy.entries:
        if entry.name is not None:
            found += [one for one in entry.ports if one not in found]
    return found


def _networks(policy: Policy, *, within_private: bool) -> Iterable[str]:
    """Rules for the entries with addresses; those with the same ports are one."""
    grouped: dict[Ports, list[IPv4Network]] = {}
    for entry in policy.entries:
        if entry.network is not None and entry.within_private == within_private:
            for one in entry.ports:
                grouped.setdefault(one, []).append(entry.network)
    for ports, networks in grouped.items():
        plain = _list(collapse_addresses(networks))
        yield f"ip daddr {{ {plain} }} {_port_match(ports)} goto allowed"


def _port_match(ports: Ports) -> str:
    return f"{ports.protocol} dport {ports.first}-{ports.last}"


def _list(networks: Iterable[IPv4Network]) -> str:
    return ", ".join(map(str, networks))
