"""The network of a sandbox as a create asks for it and as it is shown, and its egress log."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from sandboxd.api.schemas.base import Answer, Body
from sandboxd.model import NetworkMode, NetworkSpec
from sandboxd.network.policy import ENTRIES_MAX, ENTRY_CHARS_MAX, parse_entry

BANDWIDTH_MAX_MBIT: Final = 400_000


def _entry(text: str) -> str:
    return parse_entry(text).text


class NetworkBody(Body):
    """A network to what is listed."""

    allow: Annotated[
        list[
            Annotated[str, Field(min_length=1, max_length=ENTRY_CHARS_MAX), AfterValidator(_entry)]
        ],
        Field(max_length=ENTRIES_MAX),
    ] = Field(examples=[["pypi.org:443", "*.pythonhosted.org:443", "10.1.0.0/16:5432/tcp"]])
    """Host names, ``*.`` and a name for all below it, IPv4 addresses and CIDRs; each with ``:port``
    or ``:first-last`` and ``/tcp`` or ``/udp`` where not all are meant. Private and link-local
    addresses are open only to entries that lie within their range."""
    bandwidth_mbit: int | None = Field(default=None, ge=1, le=BANDWIDTH_MAX_MBIT, examples=[100])
    """In each direction, in Mbit/s; the node's ``network_bandwidth_mbit`` if left out."""
    run_network: bool = False
    """Whether it reaches, and is reached by, the other sandboxes of its ``run`` that ask for this:
    by address, and by their ``name`` and ``hostname``."""


NetworkChoice = Literal["none", "full"] | NetworkBody


def network_spec(choice: NetworkChoice, run: str) -> NetworkSpec:
    """Raises ValueError for a run's network without a run."""
    if isinstance(choice, str):
        return NetworkSpec(NetworkMode(choice))
    if choice.run_network and not run:
        raise ValueError("network.run_network needs a run")
    return NetworkSpec(
        NetworkMode.ALLOW, tuple(choice.allow), choice.bandwidth_mbit, choice.run_network
    )


class NetworkAnswer(Answer):
    """As it was asked for, entries in lower case."""

    allow: list[str]
    bandwidth_mbit: int | None
    run_network: bool


def network_answer(network: NetworkSpec) -> str | dict[str, Any]:
    if network.mode is not NetworkMode.ALLOW:
        return str(network.mode)
    return {
        "allow": list(network.allow),
        "bandwidth_mbit": network.bandwidth_mbit,
        "run_network": network.run_network,
    }


class EgressAnswer(Answer):
    """One destination or name, and how often; the same again moves it to the end."""

    seq: int
    kind: Literal["connection", "dns"]
    allowed: bool
    protocol: str = Field(examples=["tcp"])
    """``tcp``, ``udp``, ``icmp`` or a number; for ``dns`` the type that was asked for."""
    address: str
    """Empty for ``dns``."""
    port: int
    """0 where the protocol has none."""
    name: str
    """Empty for ``connection``."""
    addresses: list[str]
    """What the name led to, as far as it may."""
    first_at: str = Field(examples=["2025-11-29T15:43:07.125Z"])
    last_at: str
    count: int


class EgressCounts(Answer):
    connections_allowed: int
    connections_denied: int
    dns_allowed: int
    dns_denied: int
    entries_dropped: int
    """Those that had to make room for newer ones."""


class EgressList(Answer):
    entries: list[EgressAnswer]
    """The least recent first."""
    counts: EgressCounts
    """Of all that was logged. What a sandbox does faster than 50 times a second is not."""
    next: int
    """Give it as ``after`` to get what is new since."""
    more: bool
    """Whether there is more now."""
