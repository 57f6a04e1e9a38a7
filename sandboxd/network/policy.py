"""What a sandbox may reach: entries of an allow-list, parsed, and the addresses of nobody.

Pure: the API checks requests with it, router and resolver act on it. An entry is ::

    host[:port][/protocol]      example.org   *.example.org:443   example.org:53/udp
    address[:port][/protocol]   192.0.2.7     192.0.2.7:8080
    CIDR[:port][/protocol]      10.1.0.0/16   10.1.0.0/16:5432/tcp

``*.example.org`` is every name below example.org and not that name itself. Protocols are ``tcp``
and ``udp``; without one it is both, without a port all. Port ranges are ``8000-8100``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Final

ENTRIES_MAX: Final = 128
ENTRY_CHARS_MAX: Final = 280

NEVER: Final = tuple(
    IPv4Network(one)
    for one in ("0.0.0.0/8", "127.0.0.0/8", "192.0.0.0/24", "224.0.0.0/4", "240.0.0.0/4")
)
"""This host, loopback, protocol assignments, multicast, reserved: open to nobody, listed or not."""

METADATA: Final = tuple(
    IPv4Network(one)
    for one in (
        "169.254.0.0/16",  # link-local: AWS, Azure, Google, OpenStack and others at .169.254
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure's host
    )
)
"""What gives a machine its credentials: closed unless an entry lies within it."""

PRIVATE: Final = tuple(
    IPv4Network(one)
    for one in (
        "10.0.0.0/8",
        "100.64.0.0/10",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "198.18.0.0/15",
        *map(str, METADATA),
    )
)
"""The site's own networks, closed to an allow-list unless an entry lies within one. An entry that
is wider, such as 0.0.0.0/0, means the internet and opens none of them."""

_LABEL: Final = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_NAME: Final = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_NAME_CHARS_MAX: Final = 253
_PORTS: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class Ports:
    """A range of ports of one protocol."""

    protocol: str
    first: int
    last: int


ALL_PORTS: Final = (Ports("tcp", 1, 65535), Ports("udp", 1, 65535))


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: exactly one of ``name`` and ``network`` is set. ``text`` is its plain spelling."""

    text: str
    ports: tuple[Ports, ...]
    name: str | None = None
    network: IPv4Network | None = None

    def matches(self, name: str) -> bool:
        """Whether a name in lower case, without a dot at its end, is meant."""
        if self.name is None:
            return False
        if self.name.startswith("*."):
            return name.endswith(self.name[1:]) and len(name) > len(self.name) - 1
        return name == self.name

    @property
    def within_private(self) -> bool:
        return self.network is not None and any(
            self.network.subnet_of(one) for one in (*PRIVATE, *METADATA)
        )


def parse_entry(text: str) -> Entry:
    """Raises ValueError that says what is wrong with it."""
    if len(text) > ENTRY_CHARS_MAX or not text.isascii():
        raise ValueError(f"an entry is at most {ENTRY_CHARS_MAX} ASCII characters: {text[:60]!r}")
    rest = text.lower()
    if rest.count(":") > 1 or "[" in rest:
        raise ValueError(f"{text!r}: IPv6 is not routed to sandboxes")
    protocol = None
    for one in ("tcp", "udp"):
        if rest.endswith("/" + one):
            protocol, rest = one, rest[: -len(one) - 1]
    host, colon, port = rest.partition(":")
    ports = _ports(text, port if colon else None, protocol)
    spelled = host + (f":{port}" if colon else "") + (f"/{protocol}" if protocol else "")
    if re.fullmatch(r"[0-9./]+", host):
        return Entry(spelled, ports, network=_network(text, host))
    if "/" in host:
        raise ValueError(f"{text!r}: only tcp and udp are protocols, only addresses have a length")
    if len(host) > _NAME_CHARS_MAX or not _NAME.fullmatch(host):
        raise ValueError(f"{text!r}: neither a host name, *.name, an IPv4 address nor a CIDR")
    if host.rpartition(".")[2].isdigit():
        raise ValueError(f"{text!r}: no host name ends in a number")
    return Entry(spelled, ports, name=host)


def _ports(text: str, port: str | None, protocol: str | None) -> tuple[Ports, ...]:
    first, last = 1, 65535
    if port is not None:
        found = _PORTS.fullmatch(port)
        if found is None:
            raise ValueError(f"{text!r}: a port is a number, or two with a dash")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last <= 65535:
            raise ValueError(f"{text!r}: ports are 1 to 65535")
    return tuple(Ports(one, first, last) for one in ((protocol,) if protocol else ("tcp", "udp")))


def _network(text: str, host: str) -> IPv4Network:
    try:
        network = IPv4Network(host)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    for never in NEVER:
        if network.subnet_of(never):
            raise ValueError(f"{text!r}: {never} is not routed for anybody")
    return network


@dataclass(frozen=True, slots=True)
class Policy:
    """What one sandbox may reach; ``full`` is all but NEVER and METADATA."""

    full: bool
    entries: tuple[Entry, ...] = ()

    def ports_of(self, name: str) -> tuple[Ports, ...]:
        """What is open at the addresses of a name; nothing where it must not be resolved."""
        if self.full:
            return ALL_PORTS
        found: list[Ports] = []
        for entry in self.entries:
            if entry.matches(name):
                found += [one for one in entry.ports if one not in found]
        return tuple(found)

    def may_name_lead_to(self, address: IPv4Address) -> bool:
        """Whether an answer of DNS may hold this address: a name that is allowed is still somebody
        else's to point at the site's own networks (rebinding)."""
        if _in(NEVER, address):
            return False
        if self.full:
            return not _in(METADATA, address)
        if not _in(PRIVATE, address):
            return True
        return any(
            entry.within_private and entry.network is not None and address in entry.network
            for entry in self.entries
        )


def policy_of(mode: str, allow: Iterable[str]) -> Policy:
    """That of a spec. Raises ValueError for an entry that is none."""
    return Policy(mode == "full", tuple(parse_entry(one) for one in allow))


def _in(networks: Iterable[IPv4Network], address: IPv4Address) -> bool:
    return any(address in one for one in networks)


def parse_pool(text: str) -> IPv4Network:
    """A node's pool of addresses. Raises ValueError that says what is wrong with it."""
    pool = IPv4Network(text)
    if not 16 <= pool.prefixlen <= 22:
        raise ValueError(f"must be a /16 to a /22, not {text}")
    if not any(pool.subnet_of(one) for one in PRIVATE) or _in(METADATA, pool[0]):
        raise ValueError(f"must be private addresses, not {text}")
    return pool


def parse_upstreams(text: str) -> tuple[tuple[str, int], ...]:
    """Addresses and ports of DNS servers, comma-separated. Raises ValueError."""
    found = []
    for one in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = one.rpartition(":") if one.count(":") == 1 else (one, "", "")
        if colon and not (port.isdigit() and 1 <= int(port) <= 65535):
            raise ValueError(f"{one!r} has no port of 1 to 65535")
        found.append((str(ipaddress.ip_address(host.strip("[]"))), int(port) if colon else 53))
    return tuple(found)
