"""The network of a sandbox, through the API, against an internet of the tests' own."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dns.message
import pytest
from typer.testing import CliRunner

from sandboxd.cli import build
from sandboxd.client import Client
from tests.e2e.restarts import running_node
from tests.framework import internet
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.internet import DNS, EVIL, GOOD, OTHER, PRIVATE, Internet
from tests.framework.leaks import LeakCheck
from tests.framework.networks import (
    SETTINGS,
    egress,
    logged,
    lookup,
    networked_daemon,
    part_of,
    tcp,
)

AGAIN_S = 20.0


@pytest.fixture(scope="module")
def world() -> Iterator[Internet]:
    with internet.running() as found:
        yield found


@pytest.fixture(scope="module")
def networked(world: Internet, leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    with networked_daemon(world, leak_check, busybox) as daemon:
        yield daemon


def links_of_router(daemon: Daemon) -> list[str]:
    pid = part_of(daemon, "router")
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", "ip", "-j", "link"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [one["ifname"] for one in json.loads(done.stdout)]
    return sorted(name for name in names if name not in ("sit0", "tunl0", "ip6tnl0"))


def rules_of_router(daemon: Daemon) -> list[str]:
    """Chains, rules and sets; less what rate limits remember of an address for ten seconds, and
    less the handles, which are never used twice."""
    pid = part_of(daemon, "router")
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", "nft", "-sj", "list", "ruleset"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = []
    for one in json.loads(done.stdout)["nftables"]:
        for fields in one.values():
            fields.pop("handle", None)
            if "timeout" in fields.get("flags", ()) or "connections" in fields.get("name", ""):
                fields.pop("elem", None)
        found.append(json.dumps(one, sort_keys=True))
    return sorted(found)


def wait_until(true: Callable[[], bool], timeout_s: float = AGAIN_S) -> None:
    """For what the kernel or the node does behind an answer, and tells nobody."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.05)


def test_listed_address_is_reached_at_its_port_alone(networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": [f"{GOOD}:80"]}) as box:
        assert tcp(networked, box, GOOD, 80) == f"{GOOD}:80"
        assert tcp(networked, box, GOOD, 443) == ""
        assert tcp(networked, box, OTHER, 80) == ""


def test_what_is_not_allowed_is_refused_at_once(networked: Daemon) -> None:
    """A program must not hang on it: the time-out of a connection is minutes."""
    with networked.sandbox("busybox", network={"allow": []}) as box:
        answer = networked.exec(box, ["nc", "-w", "60", EVIL, "80"], timeout_s=30)
        assert not answer["timed_out"]
        assert "refused" in answer["stderr"], answer


def test_protocol_of_an_entry_counts(networked: Daemon) -> None:
    for entry, answer in ((f"{DNS}:53", [EVIL]), (f"{DNS}/udp", [EVIL]), (f"{DNS}:53/tcp", [])):
        with networked.sandbox("busybox", network={"allow": [entry]}) as box:
            assert lookup(networked, box, "evil.test", server=DNS) == answer, entry


def test_cidr_and_port_range(networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": ["198.51.100.8/30:400-500"]}) as box:
        assert tcp(networked, box, GOOD, 443) == f"{GOOD}:443"
        assert tcp(networked, box, OTHER, 443) == f"{OTHER}:443"
        assert tcp(networked, box, GOOD, 80) == ""
        assert tcp(networked, box, EVIL, 443) == ""


def test_entries_that_overlap(networked: Daemon) -> None:
    allow = ["198.51.100.0/24:80", f"{GOOD}:80", f"{GOOD}:80/tcp", f"{GOOD}:1-1000", f"{GOOD}/udp"]
    with networked.sandbox("busybox", network={"allow": allow}) as box:
        assert tcp(networked, box, GOOD, 443) == f"{GOOD}:443"
        assert tcp(networked, box, EVIL, 80) == f"{EVIL}:80"
        assert tcp(networked, box, EVIL, 443) == ""


def test_name_opens_its_addresses_at_its_ports(networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": ["Example.org:80"]}) as box:
        assert tcp(networked, box, GOOD, 80) == "", "nobody has asked for the name yet"
        assert lookup(networked, box, "EXAMPLE.org") == [GOOD]
        assert tcp(networked, box, GOOD, 80) == f"{GOOD}:80"
        assert tcp(networked, box, GOOD, 443) == ""
        assert tcp(networked, box, "example.org", 80) == f"{GOOD}:80"
        assert lookup(networked, box, "www.example.org") == []


def test_star_is_all_below_a_name_and_not_itself(networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": ["*.example.org"]}) as box:
        assert lookup(networked, box, "example.org") == []
        assert lookup(networked, box, "deep.www.example.org") == [OTHER]
        # Its addresses are those of an alias; the alias itself is no name of the list.
        assert lookup(networked, box, "www.example.org") == [OTHER]
        assert lookup(networked, box, "cdn.invalid") == []
        assert tcp(networked, box, OTHER, 443) == f"{OTHER}:443"


def test_name_with_a_hundred_addresses_fits_a_datagram(networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": ["many.test"]}) as box:
        found = lookup(networked, box, "many.test")
        assert 10 <= len(found) <= 30
        assert tcp(networked, box, found[-1], 80) == f"{found[-1]}:80"


def test_dns_over_tcp(networked: Daemon) -> None:
    query = dns.message.make_query("example.org.", "A").to_wire()
    packed = base64.b64encode(len(query).to_bytes(2, "big") + query).decode()
    with networked.sandbox("busybox", network={"allow": ["example.org"]}) as box:
        script = f"""
            server=$(sed -n 's/nameserver //p' /etc/resolv.conf)
            echo {packed} | base64 -d | nc -w 3 $server 53 | base64
        """
        wire = base64.b64decode(networked.exec(box, script, timeout_s=20)["stdout"])
    assert int.from_bytes(wire[:2], "big") == len(wire) - 2
    (rrset,) = dns.message.from_wire(wire[2:]).answer
    assert [rdata.address for rdata in rrset] == [GOOD]


def test_full_is_everything_but_what_is_nobodys(networked: Daemon) -> None:
    with networked.sandbox("busybox", network="full") as box:
        assert tcp(networked, box, EVIL, 5432) == f"{EVIL}:5432"
        assert tcp(networked, box, PRIVATE[0], 80) == f"{PRIVATE[0]}:80"
        assert lookup(networked, box, "evil.test") == [EVIL]
        assert lookup(networked, box, "evil.test", server=DNS) == [EVIL]
        for address in internet.METADATA_ALL:
            assert tcp(networked, box, address, 80) == ""


def test_network_is_shown_as_it_was_asked_for(networked: Daemon) -> None:
    asked = {"allow": ["Example.ORG:443/TCP", "10.1.0.0/16"], "run_network": True}
    with networked.sandbox("busybox", run="r1", network=asked) as box:
        shown = networked.http.get(f"/v1/sandboxes/{box}").json()["network"]
        assert shown == {
            "allow": ["example.org:443/tcp", "10.1.0.0/16"],
            "bandwidth_mbit": None,
            "run_network": True,
        }
    for word in ("none", "full"):
        with networked.sandbox("busybox", network=word) as box:
            assert networked.http.get(f"/v1/sandboxes/{box}").json()["network"] == word


@pytest.mark.parametrize(
    "network",
    [
        "open",
        None,
        {},
        {"allow": "example.org"},
        {"allow": [7]},
        {"allow": [""]},
        {"allow": ["a" * 300]},
        {"allow": ["x y"]},
        {"allow": ["::1"]},
        {"allow": ["127.0.0.1"]},
        {"allow": ["10.0.0.1/8"]},
        {"allow": ["example.org:70000"]},
        {"allow": ["example.org/icmp"]},
        {"allow": ["*"]},
        {"allow": ["*.*.org"]},
        {"allow": [], "bandwidth_mbit": 0},
        {"allow": [], "bandwidth_mbit": "1"},
        {"allow": [], "run_network": True},
        {"allow": [], "more": 1},
        {"allow": ["a.test"] * 129},
    ],
)
def test_network_that_is_none_is_refused(network: object, networked: Daemon) -> None:
    body = {"image": "busybox", "network": network}
    answer = networked.http.post("/v1/sandboxes", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "request-invalid")


def test_more_bandwidth_than_the_node_allows_is_refused(networked: Daemon) -> None:
    body = {"image": "busybox", "network": {"allow": [], "bandwidth_mbit": 1001}}
    error = networked.http.post("/v1/sandboxes", json=body).json()["error"]
    assert (error["code"], error["cause"]) == ("network-not-allowed", "request")
    assert error["detail"]["maximum"] == 1000


def test_run_network_is_for_its_members(networked: Daemon) -> None:
    shared = {"allow": [], "run_network": True}
    like = {"network": shared, "run": "alpha"}
    with (
        networked.sandbox("busybox", name="web", **like) as web,
        networked.sandbox("busybox", hostname="worker", **like) as worker,
        networked.sandbox("busybox", run="beta", network=shared, name="web") as foreign,
        networked.sandbox("busybox", run="alpha", network={"allow": []}) as lone,
    ):
        served = "printf '#!/bin/sh\\necho served\\n' >/bin/served; chmod 755 /bin/served\n"
        networked.exec(web, served + "nc -ll -p 7000 -e /bin/served >/dev/null 2>&1 &")
        (address,) = lookup(networked, worker, "web")
        assert lookup(networked, web, "worker") not in ([], [address])
        assert lookup(networked, foreign, "web") not in ([], [address])
        assert lookup(networked, foreign, "worker") == []
        assert lookup(networked, lone, "web") == []
        wait_until(lambda: tcp(networked, worker, address, 7000) == "served")
        assert tcp(networked, worker, "web", 7000) == "served"
        assert tcp(networked, foreign, address, 7000) == ""
        assert tcp(networked, lone, address, 7000) == ""
        assert tcp(networked, worker, address, 7000) == "served"
        # What a member answers is no connection of its own.
        assert [one for one in egress(networked, web) if one["kind"] == "connection"] == []


def test_egress_tells_where_it_went(networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": ["example.org:80"]}) as box:
        tcp(networked, box, "example.org", 80)
        tcp(networked, box, EVIL, 443)
        tcp(networked, box, EVIL, 443)
        lookup(networked, box, "secret.evil.test")
        allowed = logged(networked, box, kind="connection", allowed=True)
        assert (allowed["protocol"], allowed["address"], allowed["port"]) == ("tcp", GOOD, 80)
        denied = logged(networked, box, kind="connection", allowed=False, count=2)
        assert (denied["address"], denied["port"]) == (EVIL, 443)
        assert logged(networked, box, kind="dns", name="example.org", protocol="A")[
            "addresses"
        ] == [GOOD]
        assert not logged(networked, box, kind="dns", name="secret.evil.test")["allowed"]
        whole = networked.http.get(f"/v1/sandboxes/{box}/egress").json()
        assert whole["counts"]["connections_denied"] == 2
        assert not whole["more"]
        page = networked.http.get(f"/v1/sandboxes/{box}/egress", params={"limit": 1}).json()
        assert (len(page["entries"]), page["more"]) == (1, True)
        rest = networked.http.get(
            f"/v1/sandboxes/{box}/egress", params={"after": page["next"]}
        ).json()
        assert page["entries"] + rest["entries"] == whole["entries"]


def test_sandbox_without_a_network_has_no_egress(networked: Daemon) -> None:
    with networked.sandbox("busybox") as box:
        assert egress(networked, box) == []
        assert networked.exec(box, "cat /proc/net/route | wc -l")["stdout"] == "1\n"


def test_egress_through_client_and_command_line(networked: Daemon, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(networked.token)
    token.chmod(0o600)
    with (
        Client(networked.base_url, token=networked.token) as node,
        node.create("busybox", network={"allow": ["example.org"]}) as box,
    ):
        assert box.info.network == {
            "allow": ["example.org"],
            "bandwidth_mbit": None,
            "run_network": False,
        }
        lookup(networked, box.id, "example.org")
        (entry,) = [one for one in box.egress().entries if one.protocol == "A"]
        assert (entry.name, entry.addresses, entry.allowed) == ("example.org", [GOOD], True)
        words = ["egress", box.id, "--url", networked.base_url, "--token-file", str(token)]
        runner = CliRunner(env={"SANDBOXD_TESTS_SHARED_HOST": None})
        shown = runner.invoke(build(), words)
        assert shown.exit_code == 0, shown.output
        assert f"example.org {GOOD}" in shown.stdout
        as_json = runner.invoke(build(), [*words, "--json"])
        assert json.loads(as_json.stdout)["counts"]["dns_allowed"] >= 1


def test_reset_keeps_the_rules_and_not_what_names_had_opened(networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": ["example.org:80", f"{OTHER}:80"]}) as box:
        lookup(networked, box, "example.org")
        assert tcp(networked, box, GOOD, 80) == f"{GOOD}:80"
        answer = networked.http.post(f"/v1/sandboxes/{box}/reset", json={})
        assert answer.status_code == 200, answer.text
        assert tcp(networked, box, OTHER, 80) == f"{OTHER}:80"
        assert tcp(networked, box, OTHER, 443) == ""
        assert tcp(networked, box, GOOD, 80) == ""
        assert lookup(networked, box, "example.org") == [GOOD]
        assert tcp(networked, box, GOOD, 80) == f"{GOOD}:80"


def test_fork_of_a_snapshot_has_the_network_it_asks_for(networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": [GOOD]}) as box:
        taken = networked.http.post(f"/v1/sandboxes/{box}/snapshots", json={"ttl_s": 60})
        assert taken.is_success, taken.text
        assert tcp(networked, box, GOOD, 80) == f"{GOOD}:80"
    snapshot = taken.json()["id"]
    body = {"snapshot": snapshot, "network": {"allow": [OTHER]}}
    fork = networked.http.post("/v1/sandboxes", json=body).json()["id"]
    assert tcp(networked, fork, GOOD, 80) == ""
    assert tcp(networked, fork, OTHER, 80) == f"{OTHER}:80"
    networked.delete(fork)
    assert networked.http.delete(f"/v1/snapshots/{snapshot}").is_success


def test_image_with_a_symlink_for_a_resolv_conf(networked: Daemon) -> None:
    """It is replaced, not followed: a snapshot stands for an image that has one."""
    with networked.sandbox("busybox") as box:
        networked.exec(box, "mkdir -p /etc && ln -sf /run/nowhere /etc/resolv.conf")
        taken = networked.http.post(f"/v1/sandboxes/{box}/snapshots", json={"ttl_s": 60}).json()
    body = {"snapshot": taken["id"], "network": {"allow": ["example.org"]}}
    fork = networked.http.post("/v1/sandboxes", json=body).json()["id"]
    assert lookup(networked, fork, "example.org") == [GOOD]
    assert networked.exec(fork, "stat -c %F:%U:%a /etc/resolv.conf")["stdout"] == (
        "regular file:root:644\n"
    )
    networked.delete(fork)
    networked.http.delete(f"/v1/snapshots/{taken['id']}")


def test_bandwidth_is_held_in_both_directions(networked: Daemon) -> None:
    """2 MB at 8 Mbit/s take two seconds less the burst: the only figure here is a lower bound."""
    with networked.sandbox("busybox", network={"allow": [GOOD], "bandwidth_mbit": 8}) as box:
        script = f"head -c 2000000 /dev/zero | nc -w 20 {GOOD} 80"
        answer = networked.exec(box, script, timeout_s=60)
        assert answer["stdout"].splitlines()[-1] == "2000000"
        assert answer["wall_s"] > 1.5
    limits = subprocess.run(
        ["nsenter", f"--net=/proc/{part_of(networked, 'router')}/ns/net", "--", "tc", "qdisc"],
        capture_output=True,
        text=True,
        check=True,
    )
    with networked.sandbox("busybox", network={"allow": [GOOD], "bandwidth_mbit": 8}):
        after = subprocess.run(limits.args, capture_output=True, text=True, check=True)
        assert "rate 8Mbit" in after.stdout
        assert "rate 8Mbit" not in limits.stdout


def test_deleting_leaves_nothing_in_the_router(networked: Daemon) -> None:
    wait_until(lambda: links_of_router(networked) == ["lo", "up"])
    before = rules_of_router(networked)
    like = {"allow": ["example.org", "10.0.0.0/8:1", "0.0.0.0/0:2"], "run_network": True}
    with networked.sandbox("busybox", run="x", network=like) as box:
        lookup(networked, box, "example.org")
        assert len(links_of_router(networked)) == 3
        assert rules_of_router(networked) != before
    wait_until(lambda: links_of_router(networked) == ["lo", "up"])
    # Rules go before their link does, in one transaction; the run's set once nobody is in it.
    wait_until(lambda: rules_of_router(networked) == before)


@pytest.mark.parametrize("part", ["router", "resolver"])
def test_part_that_dies_comes_back_with_every_link(part: str, networked: Daemon) -> None:
    with networked.sandbox("busybox", network={"allow": ["example.org:80"]}) as box:
        assert tcp(networked, box, "example.org", 80) == f"{GOOD}:80"
        pid = part_of(networked, part)
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], 10)[0]
        os.close(pidfd)
        wait_until(lambda: lookup(networked, box, "example.org") == [GOOD])
        assert tcp(networked, box, GOOD, 80) == f"{GOOD}:80"
        assert tcp(networked, box, EVIL, 80) == ""
        networked.refresh_family()


def test_node_says_what_network_it_gives(networked: Daemon) -> None:
    assert networked.http.get("/v1/node").json()["network"] == {
        "allow": True,
        "full": True,
        "run_network": True,
        "ipv6": False,
        "bandwidth_mbit": 1000,
        "refusal": "",
    }


def test_host_that_does_not_forward_refuses_by_name(
    world: Internet, leak_check: LeakCheck, busybox: Path
) -> None:
    world.forward(False)
    try:
        with running_daemon(leak_check, {"busybox": busybox}, network=world.enter) as daemon:
            body = {"image": "busybox", "network": {"allow": [GOOD]}}
            answer = daemon.http.post("/v1/sandboxes", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (501, "network-unavailable")
            assert (error["cause"], error["retryable"]) == ("node", False)
            assert "net.ipv4.ip_forward" in error["message"]
            said = daemon.http.get("/v1/node").json()["network"]
            assert not said["allow"]
            assert "net.ipv4.ip_forward" in said["refusal"]
            full = daemon.http.post("/v1/sandboxes", json={"image": "busybox", "network": "full"})
            assert (full.status_code, full.json()["error"]["code"]) == (403, "network-not-allowed")
            with daemon.sandbox("busybox", network="none") as box:
                daemon.exec(box, "echo kept >/kept")
                taken = daemon.http.post(f"/v1/sandboxes/{box}/snapshots", json={"ttl_s": 60})
            # What fails late lets go of what it stood on once, and not twice.
            snapshot = taken.json()["id"]
            fork = {"snapshot": snapshot, "network": {"allow": [GOOD]}}
            for _ in range(3):
                assert daemon.http.post("/v1/sandboxes", json=fork).status_code == 501
            made = daemon.http.post("/v1/sandboxes", json={"snapshot": snapshot}).json()["id"]
            assert daemon.exec(made, "cat /kept")["stdout"] == "kept\n"
            daemon.delete(made)
            assert daemon.http.delete(f"/v1/snapshots/{snapshot}").is_success
            assert world.on_host("sysctl", "-n", "net.ipv4.ip_forward").strip() == "0"
    finally:
        world.forward(True)


def test_host_is_as_before_once_the_daemon_has_ended(
    world: Internet, leak_check: LeakCheck, busybox: Path
) -> None:
    """Also where everything was killed: then the next one of the same place takes it away."""
    sysctls = world.on_host("sysctl", "-a", "--pattern", "^net[.]")
    before = (world.links(), world.routes())
    tables = world.tables()
    with networked_daemon(world, leak_check, busybox) as daemon:
        assert len(world.tables()) == len(tables) + 1
        assert len(world.links()) == len(before[0]) + 1
        # What was there is as it was: the new ones are those of our own link.
        now = world.on_host("sysctl", "-a", "--pattern", "^net[.]").splitlines()
        assert set(sysctls.splitlines()) - set(now) <= _moving(sysctls)
        del daemon
    wait_until(lambda: (world.links(), world.routes()) == before)
    assert world.tables() == tables


def test_restarted_daemon_finds_networks_as_they_were(
    world: Internet, leak_check: LeakCheck, busybox: Path
) -> None:
    """Links and logs are the node's, whose namespace this is; the daemons have the machine's."""
    images = {"busybox": busybox}
    with running_node(leak_check, images, SETTINGS, network=world.enter) as node:
        daemon = node.serve()
        box = daemon.create("busybox", network={"allow": ["example.org:80"]})
        assert tcp(daemon, box, "example.org", 80) == f"{GOOD}:80"
        shown = daemon.http.get(f"/v1/sandboxes/{box}").json()["network"]
        node.kill_daemon(daemon)
        again = node.serve()
        assert again.http.get(f"/v1/sandboxes/{box}").json()["network"] == shown
        assert logged(again, box, kind="dns", name="example.org", protocol="A")["allowed"]
        assert tcp(again, box, GOOD, 80) == f"{GOOD}:80"
        assert tcp(again, box, EVIL, 80) == ""
        assert lookup(again, box, "evil.test") == []
        assert again.http.post(f"/v1/sandboxes/{box}/reset", json={}).status_code == 200
        assert tcp(again, box, "example.org", 80) == f"{GOOD}:80"
        again.delete(box)


def _moving(text: str) -> set[str]:
    """Sysctls that are counters."""
    names = ("nf_conntrack_count", "random", "epoch", "inode-nr", "dentry-state")
    return {line for line in text.splitlines() if any(name in line for name in names)}
