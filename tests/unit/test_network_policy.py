"""What a create may ask for of a network: entries, and the addresses that are nobody's."""

from __future__ import annotations

import json
from ipaddress import IPv4Address

import pytest

from sandboxd.model import NetworkMode, NetworkSpec, SandboxSpec
from sandboxd.network.policy import (
    parse_entry,
    parse_pool,
    parse_upstreams,
    policy_of,
)


def spelled(text: str) -> tuple[str, list[tuple[str, int, int]]]:
    entry = parse_entry(text)
    where = entry.name or str(entry.network)
    return where, [(one.protocol, one.first, one.last) for one in entry.ports]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("example.org", ("example.org", [("tcp", 1, 65535), ("udp", 1, 65535)])),
        ("Example.ORG:443", ("example.org", [("tcp", 443, 443), ("udp", 443, 443)])),
        ("*.example.org:80/tcp", ("*.example.org", [("tcp", 80, 80)])),
        ("10.1.0.0/16:5432/TCP", ("10.1.0.0/16", [("tcp", 5432, 5432)])),
        ("192.0.2.7", ("192.0.2.7/32", [("tcp", 1, 65535), ("udp", 1, 65535)])),
        ("192.0.2.7/udp", ("192.0.2.7/32", [("udp", 1, 65535)])),
        ("192.0.2.0/24:8000-8100/udp", ("192.0.2.0/24", [("udp", 8000, 8100)])),
        ("0.0.0.0/0:443", ("0.0.0.0/0", [("tcp", 443, 443), ("udp", 443, 443)])),
        ("a_b-c.d1", ("a_b-c.d1", [("tcp", 1, 65535), ("udp", 1, 65535)])),
        ("localhost-ish", ("localhost-ish", [("tcp", 1, 65535), ("udp", 1, 65535)])),
    ],
)
def test_entry(text: str, expected: object) -> None:
    assert spelled(text) == expected
    assert spelled(parse_entry(text).text) == expected, "its plain spelling means the same"


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "a b", "a..b", ".a", "a.", "-a.b", "a-.b", "a" * 64 + ".b", "a." * 127 + "bb"),
        *("*", "*.", "a.*.b", "**.a", "*a.b", "http://a.b", "a.b/", "a.b/icmp", "a.b/24"),
        *("a.b:", "a.b:0", "a.b:65536", "a.b:-1", "a.b:9-8", "a.b:1-", "a.b:x", "a.b:1:2"),
        *("::1", "[::1]:80", "2001:db8::/32", "fe80::1%eth0", "a.b\0", "a.b\n", "é.fr", "a@b.c"),
        *("1.2.3", "1.2.3.4.5", "1.2.3.256", "01.2.3.4", "10.0.0.1/8", "10.0.0.0/33", "a.1"),
        *("127.0.0.1", "127.0.0.0/8", "0.0.0.0", "0.0.0.0/8", "224.0.0.1", "255.255.255.255"),
        *("240.0.0.0/4", "192.0.0.8", "1.2.3.4:80/tcp/udp", "\u0661.2.3.4"),
    ],
)
def test_what_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError):
        parse_entry(text)


@pytest.mark.parametrize(
    ("entry", "name", "meant"),
    [
        ("example.org", "example.org", True),
        ("example.org", "www.example.org", False),
        ("example.org", "xexample.org", False),
        ("*.example.org", "www.example.org", True),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", ".example.org", False),
        ("*.example.org", "xexample.org", False),
        ("*.example.org", "example.org.evil.test", False),
        ("192.0.2.7", "192.0.2.7", False),
    ],
)
def test_names_that_an_entry_means(entry: str, name: str, meant: bool) -> None:
    assert parse_entry(entry).matches(name) is meant


@pytest.mark.parametrize(
    ("allow", "address", "may"),
    [
        ([], "198.51.100.1", True),
        *(([], one, False) for one in ("10.0.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1")),
        *(([], one, False) for one in ("169.254.169.254", "100.100.100.200", "168.63.129.16")),
        *(([], one, False) for one in ("127.0.0.1", "0.0.0.0", "224.0.0.251", "255.255.255.255")),
        (["10.0.0.0/8"], "10.0.0.1", True),
        (["10.0.0.0/9"], "10.200.0.1", False),
        (["10.0.0.1:80"], "10.0.0.1", True),
        (["169.254.169.254"], "169.254.169.254", True),
        (["0.0.0.0/0"], "10.0.0.1", False),
        (["0.0.0.0/0"], "169.254.169.254", False),
        (["8.0.0.0/5"], "10.0.0.1", False),
    ],
)
def test_where_a_name_may_lead(allow: list[str], address: str, may: bool) -> None:
    assert policy_of("allow", allow).may_name_lead_to(IPv4Address(address)) is may


def test_full_may_lead_to_the_sites_own_but_not_to_credentials() -> None:
    full = policy_of("full", [])
    assert full.may_name_lead_to(IPv4Address("10.0.0.1"))
    for address in ("169.254.169.254", "100.100.100.200", "168.63.129.16", "127.0.0.1"):
        assert not full.may_name_lead_to(IPv4Address(address))


def test_ports_of_a_name_are_those_of_all_entries_that_mean_it() -> None:
    policy = policy_of("allow", ["a.test:80/tcp", "*.test:443/tcp", "a.test:80/tcp", "1.2.3.4:1"])
    assert [(one.protocol, one.first) for one in policy.ports_of("a.test")] == [
        ("tcp", 80),
        ("tcp", 443),
    ]
    assert policy.ports_of("b.other") == ()


@pytest.mark.parametrize("text", ["8.8.0.0/16", "10.0.0.0/8", "10.0.0.0/24", "10.0.0.1/16", "x"])
def test_pool_that_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_pool(text)


def test_upstreams() -> None:
    assert parse_upstreams("192.0.2.1, 192.0.2.2:5353,2001:db8::1") == (
        ("192.0.2.1", 53),
        ("192.0.2.2", 5353),
        ("2001:db8::1", 53),
    )
    for wrong in ("dns.example", "192.0.2.1:0", "192.0.2.1:x"):
        with pytest.raises(ValueError):
            parse_upstreams(wrong)


def test_spec_comes_back_from_what_the_launcher_keeps() -> None:
    network = NetworkSpec(NetworkMode.ALLOW, ("a.test:80", "10.0.0.0/8"), 20, True)
    for one in (network, NetworkSpec(), NetworkSpec(NetworkMode.FULL)):
        spec = SandboxSpec(image="debian", run="r", network=one)
        assert SandboxSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
