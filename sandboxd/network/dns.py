"""Answers a sandbox's DNS queries: which names are asked for upstream, what of an answer is given.

An allow-list's sandbox can ask for the addresses of its names and of nothing else: a name or a type
that is passed on is a way out for data. What is asked upstream is a query of our own, with nothing
of the sandbox's but the name in lower case. What comes back is given as plain A records of the name
that was asked for: no aliases, no further sections, no address the name must not lead to; and the
addresses are open before it is given. Only ``Answerer`` is used from outside.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Final

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from sandboxd.network.egress import EgressLog
from sandboxd.network.policy import Policy, Ports

QUERIES_PER_SECOND: Final = 50.0
QUERIES_BURST: Final = 200.0
PENDING_MAX: Final = 64
"""Queries of one sandbox that wait for an upstream."""

ADDRESSES_MAX: Final = 24
"""Of one answer: fits a datagram of 512 bytes, as some programs know no other."""
OPEN_MAX: Final = 1024
"""Addresses that one sandbox has open."""
TTL_LEAST_S: Final = 5
TTL_MOST_S: Final = 300
"""Of an answer. A name that moves every second would have the router renew as often."""
OPEN_BEYOND_TTL_S: Final = 300
"""How long an address stays open after the answer that named it is stale: programs resolve once,
and connect again a little later."""
GROUP_TTL_S: Final = 5
UDP_BYTES_MAX: Final = 1232
"""As DNS Flag Day 2020 has it: never in fragments."""

_FULL_TYPES: Final = frozenset(
    dns.rdatatype.from_text(one) for one in ("CAA", "CNAME", "MX", "NS", "PTR", "SOA", "SRV", "TXT")
)
"""What a sandbox with all of the network may ask for besides A."""

Ask = Callable[[dns.message.Message], Awaitable[dns.message.Message]]
"""Asks an upstream. Raises OSError or dns.exception.DNSException."""
Open = Callable[[int, Sequence[str], Sequence[Ports], int], Awaitable[None]]
"""Has the router open addresses to a link for so many seconds. Raises OSError."""


@dataclass(eq=False, slots=True)
class Client:
    """One link, as the resolver knows it."""

    link: int
    sandbox: str
    policy: Policy
    group: dict[str, set[str]] | None
    """Addresses by name of the members of its run's network."""
    log: EgressLog
    pending: int = 0
    opened: dict[str, float] = field(default_factory=dict)
    """Until when (monotonic) each address is open."""
    _tokens: float = QUERIES_BURST
    _refilled_at: float = field(default_factory=time.monotonic)

    def may_ask(self) -> bool:
        """Take one token; what has none is dropped without an answer."""
        now = time.monotonic()
        gained = (now - self._refilled_at) * QUERIES_PER_SECOND
        self._tokens, self._refilled_at = min(QUERIES_BURST, self._tokens + gained), now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Answerer:
    def __init__(self, ask: Ask, open_addresses: Open) -> None:
        self._ask = ask
        self._open = open_addresses

    async def answer(self, client: Client, wire: bytes, size_max: int) -> bytes | None:
        """The answer to a datagram, of ``size_max`` bytes at most; None for what deserves none."""
        if not client.may_ask() or client.pending >= PENDING_MAX:
            return None
        try:
            query = dns.message.from_wire(wire)
        except (dns.exception.DNSException, ValueError):
            return None
        if query.flags & dns.flags.QR or len(query.question) != 1:
            return None
        client.pending += 1
        try:
            response = await self._respond(client, query)
        finally:
            client.pending -= 1
        if query.edns >= 0:
            size_max = min(size_max, max(512, query.payload))
        elif size_max == UDP_BYTES_MAX:
            size_max = 512
        return response.to_wire(max_size=size_max, prefer_truncation=True)

    async def _respond(self, client: Client, query: dns.message.Message) -> dns.message.Message:
        response = dns.message.make_response(query, recursion_available=True)
        question = query.question[0]
        if query.opcode() != dns.opcode.QUERY or question.rdclass != dns.rdataclass.IN:
            response.set_rcode(dns.rcode.NOTIMP)
            return response
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        members = client.group.get(name) if client.group is not None else None
        if members:
            if question.rdtype == dns.rdatatype.A:
                _put(response, question.name, sorted(members), GROUP_TTL_S)
            client.log.query(True, kind, name, tuple(sorted(members)))
            return response
        ports = client.policy.ports_of(name)
        if not ports:
            # Not REFUSED: several C libraries take that for a server to be asked again.
            response.set_rcode(dns.rcode.NXDOMAIN)
            client.log.query(False, kind, name, ())
            return response
        addresses: tuple[str, ...] = ()
        try:
            if question.rdtype == dns.rdatatype.A:
                addresses = await self._resolve(client, name, ports, response)
            elif client.policy.full and question.rdtype in _FULL_TYPES:
                upstream = await self._ask(dns.message.make_query(name + ".", question.rdtype))
                response.set_rcode(upstream.rcode())
                response.answer = [one for one in upstream.answer if one.rdtype == question.rdtype]
        except (OSError, dns.exception.DNSException):
            response.answer = []
            response.set_rcode(dns.rcode.SERVFAIL)
        client.log.query(True, kind, name, addresses)
        return response

    async def _resolve(
        self,
        client: Client,
        name: str,
        ports: Sequence[Ports],
        response: dns.message.Message,
    ) -> tuple[str, ...]:
        upstream = await self._ask(dns.message.make_query(name + ".", dns.rdatatype.A))
        if not isinstance(upstream, dns.message.QueryMessage):
            raise OSError(71, "no answer to a query", name)
        if upstream.rcode() != dns.rcode.NOERROR:
            passed_on = upstream.rcode() == dns.rcode.NXDOMAIN
            response.set_rcode(dns.rcode.NXDOMAIN if passed_on else dns.rcode.SERVFAIL)
            return ()
        chain = upstream.resolve_chaining()
        found = [] if chain.answer is None else [rdata.address for rdata in chain.answer]
        addresses = [one for one in found if client.policy.may_name_lead_to(IPv4Address(one))][
            :ADDRESSES_MAX
        ]
        if not addresses:
            return ()
        ttl_s = max(TTL_LEAST_S, min(TTL_MOST_S, chain.minimum_ttl))
        if not client.policy.full:
            await self._open_to(client, addresses, ports, ttl_s)
        _put(response, response.question[0].name, addresses, ttl_s)
        return tuple(addresses)

    async def _open_to(
        self, client: Client, addresses: Sequence[str], ports: Sequence[Ports], ttl_s: int
    ) -> None:
        now = time.monotonic()
        for stale in [one for one, until in client.opened.items() if until <= now]:
            del client.opened[stale]
        if len(client.opened.keys() | set(addresses)) > OPEN_MAX:
            raise OSError(28, "too many addresses are open", client.sandbox)
        timeout_s = ttl_s + OPEN_BEYOND_TTL_S
        await self._open(client.link, addresses, ports, timeout_s)
        client.opened |= dict.fromkeys(addresses, now + timeout_s)


def _put(
    response: dns.message.Message, name: dns.name.Name, addresses: Sequence[str], ttl_s: int
) -> None:
    response.answer = [
        dns.rrset.from_text_list(name, ttl_s, dns.rdataclass.IN, dns.rdatatype.A, addresses)
    ]
