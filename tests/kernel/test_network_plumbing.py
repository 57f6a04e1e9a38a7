"""The router's rules and links in network namespaces of the tests' own, without a daemon."""

from __future__ import annotations

import json
import os
from ipaddress import IPv4Address
from typing import Any

import pytest

from sandboxd.linux import child, namespaces, nflog
from sandboxd.linux.nftables import Nftables, NftError
from sandboxd.network import links, ruleset, uplink
from sandboxd.network.policy import Ports, parse_pool, policy_of
from sandboxd.network.ruleset import Link, Plan

pytestmark = pytest.mark.needs("root", "namespaces")

PLAN = Plan(parse_pool("100.126.0.0/16"))
ALLOW = ["*.test:443", "a.test", "10.0.0.0/8:1-9/udp", "10.1.0.0/16", "0.0.0.0/0:80", "8.8.8.8:80"]


def in_namespace(function: Any) -> Any:
    """What a function returns in a network namespace that ends with it."""
    return child.run(function, 30, namespaces.CLONE_NEWNET)


def objects(nft: Nftables) -> list[str]:
    """All that a ruleset holds but for handles, which are never used twice."""
    found = []
    for one in nft.listed("list ruleset"):
        for fields in one.values():
            fields.pop("handle", None)
        found.append(json.dumps(one, sort_keys=True))
    return sorted(found)


@pytest.mark.parametrize("mode", ["allow", "full"])
@pytest.mark.parametrize("group", [None, 3])
def test_removing_a_link_leaves_the_rules_as_they_were(mode: str, group: int | None) -> None:
    def work() -> Any:
        with Nftables() as nft:
            nft.run(ruleset.base(PLAN))
            nft.run(ruleset.add_group(3))
            before = objects(nft)
            link = Link(5, IPv4Address("100.126.0.9"), policy_of(mode, ALLOW), group)
            other = Link(6, IPv4Address("100.126.0.10"), policy_of(mode, ALLOW), group)
            nft.run(ruleset.add_link(link))
            nft.run(ruleset.add_link(other))
            grown = len(objects(nft)) > len(before)
            if mode == "allow":
                ports = ruleset.ports_of_names(link.policy)
                for _ in range(2):  # renewed
                    nft.run(ruleset.open_addresses(link, [IPv4Address("8.8.4.4")], ports, 60))
            nft.run(ruleset.remove_link(other))
            nft.run(ruleset.remove_link(link))
            return grown, objects(nft) == before

    assert in_namespace(work) == [True, True]


def test_batch_is_all_or_nothing() -> None:
    def work() -> Any:
        with Nftables() as nft:
            nft.run(ruleset.base(PLAN))
            before = objects(nft)
            with pytest.raises(NftError, match="No such file"):
                nft.run("add set inet router x { type ipv4_addr; }\nadd chain inet nowhere y")
            return objects(nft) == before

    assert in_namespace(work) is True


def test_renewing_an_address_lets_it_live_longer() -> None:
    def work() -> Any:
        with Nftables() as nft:
            nft.run(ruleset.base(PLAN))
            link = Link(1, PLAN.pool[9], policy_of("allow", ["a.test:80/tcp"]))
            nft.run(ruleset.add_link(link))
            for timeout_s in (10, 1000):
                address = [IPv4Address("8.8.4.4")]
                nft.run(ruleset.open_addresses(link, address, [Ports("tcp", 80, 80)], timeout_s))
            (found,) = [one["set"] for one in nft.listed("list set inet router d1_0")]
            return [one["elem"]["expires"] for one in found["elem"]]

    (expires_s,) = in_namespace(work)
    assert expires_s > 900


def test_link_with_both_ends_and_nothing_left_of_one_that_failed() -> None:
    def work() -> Any:
        from pyroute2 import IPRoute

        home = namespaces.open_namespace("self", "net")
        namespaces.unshare(namespaces.CLONE_NEWNET)
        inside = namespaces.open_namespace("self", "net")
        namespaces.setns(home, namespaces.CLONE_NEWNET)
        with IPRoute() as routes:
            like = {"name": "s1", "gateway": PLAN.gateway, "bandwidth_mbit": 10}
            links.add(routes, home, inside, address=PLAN.pool[9], **like)
            names = [one.get_attr("IFLA_IFNAME") for one in routes.get_links()]
            (route,) = routes.get_routes(family=2, dst=f"{PLAN.pool[9]}/32")
            back = namespaces.namespace_id("self", "net") == os.fstat(home).st_ino
            with pytest.raises(OSError, match="s2"):
                # There is an eth0 already.
                links.add(routes, home, inside, address=PLAN.pool[10], **{**like, "name": "s2"})
            links.remove(routes, "s1")
            links.remove(routes, "s1")
            left = [one.get_attr("IFLA_IFNAME") for one in routes.get_links()]
        return "s1" in names, bool(route), back, sorted(set(left) & {"s1", "s2"})

    assert in_namespace(work) == [True, True, True, []]


def test_logged_packet_comes_with_its_verdict() -> None:
    def work() -> Any:
        import socket

        with Nftables() as nft, nflog.bound(7) as log:
            nft.run(
                "add table inet t\n"
                "add chain inet t out { type filter hook output priority 0; }\n"
                'add rule inet t out udp dport 4242 log prefix "deny" group 7 drop'
            )
            from pyroute2 import IPRoute

            with IPRoute() as routes:
                routes.link("set", index=1, state="up")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                with pytest.raises(PermissionError):  # dropped in the output hook
                    sender.sendto(b"x" * 500, ("127.0.0.1", 4242))
            log.settimeout(10)
            return [
                [one.prefix, one.source, one.destination, one.protocol, one.port]
                for one in nflog.parse(log.recv(65536))
            ]

    assert in_namespace(work) == [["deny", "127.0.0.1", "127.0.0.1", 17, 4242]]


def test_an_ordinary_user_is_not_told_that_he_must_be_root(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """His node asks at its start what the last one left; libnftables writes to stderr by itself."""

    def as_user() -> list[bool]:
        os.setresuid(65_533, 65_533, 65_533)
        return [uplink.has_table("nobody's")]

    assert child.run(as_user, 30) == [False]
    assert capfd.readouterr() == ("", "")
