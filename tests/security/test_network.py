"""Network: a loopback of its own, and nothing else."""

from __future__ import annotations

import socket

import pytest

from tests.framework import times
from tests.framework.daemon import Daemon
from tests.security.probing import Host, Inside

NOWHERE = {"ENETUNREACH", "EHOSTUNREACH", "ECONNREFUSED", "EADDRNOTAVAIL"}


def port_of(daemon: Daemon) -> int:
    return int(daemon.base_url.rpartition(":")[2])


def test_only_loopback_is_there(inside: Inside) -> None:
    interfaces = [
        line.split(":")[0].strip() for line in inside.shell("cat /proc/net/dev").splitlines()
    ]
    named = [name for name in interfaces[2:] if name not in ("sit0", "tunl0", "ip6tnl0")]
    assert named == ["lo"]
    assert inside.shell("ls /sys/class/net").split()[:1] == ["lo"]


def test_there_is_no_route(inside: Inside) -> None:
    assert len(inside.shell("cat /proc/net/route").splitlines()) <= 1
    routes = inside.shell("cat /proc/net/ipv6_route").splitlines()
    assert [line for line in routes if line.split()[-1] != "lo"] == []


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "1.1.1.1",
        "10.0.0.1",
        "172.17.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.100.100.200",
    ],
)
def test_address_is_not_reached(address: str, inside: Inside) -> None:
    assert inside.ask(f"connect:{address},80") in NOWHERE
    assert inside.ask(f"send_udp:{address}") in NOWHERE


@pytest.mark.parametrize("address", ["2606:4700:4700::1111", "fe80::1", "fd00:ec2::254"])
def test_ipv6_address_is_not_reached(address: str, inside: Inside) -> None:
    assert inside.ask(f"connect6:{address},80") in NOWHERE | {"EINVAL", "EAFNOSUPPORT"}


def test_daemons_port_is_not_reached(inside: Inside, daemon: Daemon, host: Host) -> None:
    port = port_of(daemon)
    assert host.ask(f"connect:127.0.0.1,{port}") == "ok 0"
    assert inside.ask(f"connect:127.0.0.1,{port}") == "ECONNREFUSED"
    assert inside.ask(f"connect:127.1.2.3,{port}") == "ECONNREFUSED"
    assert inside.ask(f"connect:0.0.0.0,{port}") == "ECONNREFUSED"
    assert inside.ask(f"connect6:::1,{port}") in NOWHERE


def test_port_on_every_address_of_the_host_is_not_reached(inside: Inside, host: Host) -> None:
    addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        assert host.ask(f"connect:127.0.0.1,{port}") == "ok 0"
        for address in addresses:
            if ":" not in address:
                assert inside.ask(f"connect:{address},{port}") in NOWHERE


def test_control_the_own_loopback_works(inside: Inside) -> None:
    script = """
        (echo hello | nc -l -p 4321 -w 5 >/dev/null 2>&1 &)
        usleep 200000; nc -w 2 127.0.0.1 4321 </dev/null
    """
    assert "hello" in inside.shell(script, timeout_s=times.scaled(20))


@pytest.mark.parametrize("what", ["link_add", "route_add", "address_add"])
def test_network_cannot_be_configured(what: str, inside: Inside, host: Host) -> None:
    assert inside.ask(what) == "EPERM"
    assert inside.ask("link_list") == "ok 0"
    assert host.ask(what) in {"EINVAL", "EOPNOTSUPP", "ENODEV", "ENOENT"}


@pytest.mark.parametrize(
    "command",
    [
        "ip link set lo down",
        "ip addr add 10.1.1.1/24 dev lo",
        "ip route add default dev lo",
        "ifconfig lo down",
    ],
)
def test_network_tool_is_refused(command: str, inside: Inside) -> None:
    answer = inside.run(command)
    assert answer["exit_code"] != 0
    assert "not permitted" in answer["stderr"], answer


def test_names_are_not_resolved(inside: Inside) -> None:
    assert inside.run("nslookup example.com 8.8.8.8", timeout_s=times.scaled(20))["exit_code"] != 0


def test_listening_socket_of_a_sandbox_is_not_on_the_host(as_root: Inside) -> None:
    as_root.shell("nc -l -p 4444 >/dev/null 2>&1 &\nusleep 100000")
    with socket.socket() as probe:
        probe.settimeout(2)
        assert probe.connect_ex(("127.0.0.1", 4444)) != 0
    as_root.shell("killall nc")
