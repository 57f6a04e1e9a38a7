"""``python -m sandboxd.network.router``: owner of the namespace in which all veth pairs end.

fd 3: hostd, whose end of it is the order to end; 4: the launcher; 5: the resolver; 6: the node's
user namespace. Order of its start, and why:

  1. a child that stays root of the host waits to make the uplink;
  2. the node's user namespace, and a network namespace that belongs to it;
  3. the uplink; gateway, routes and rules, before any sandbox is there;
  4. id 65536 of the user namespace, like the launcher, with two capabilities and no more;
  5. the resolver's sockets are made, bound, and given to it: it could not bind them itself.

From the launcher (each ``{"id": 1, "op": …}`` answered by ``{"id": 1, "ok": …}`` or ``{"id": 1,
"errno": …, "what": …}``): ``attach`` (fd: the sandbox's network namespace), ``detach`` and
``ping``. From the resolver: ``open``. To it: ``serve``, ``policy``, ``gone``. Whoever of launcher
and resolver goes, the router goes with them, and with it every link: what is left is no network,
never an open one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import select
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Final

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

from sandboxd.late_imports import CODECS, import_whole
from sandboxd.launcher import protocol
from sandboxd.linux import capabilities as cap
from sandboxd.linux import namespaces, nflog
from sandboxd.linux.nftables import Nftables
from sandboxd.linux.process import set_dumpable, set_no_new_privs
from sandboxd.log_lines import fold_stderr
from sandboxd.network import links, ruleset, uplink
from sandboxd.network.policy import Ports, parse_pool, policy_of
from sandboxd.network.ruleset import Link, Plan

HOSTD: Final = 3
LAUNCHER: Final = 4
RESOLVER: Final = 5
USER_NAMESPACE: Final = 6

DNS_PORT: Final = 53
DNS_BACKLOG: Final = 64
OPEN_TIMEOUT_MAX_S: Final = 7200

_IMPORTED_WHOLE: Final = (CODECS, "pyroute2.netlink", "pyroute2.requests")


class Router:
    """The namespace's state: every link by its number."""

    def __init__(self, plan: Plan, network: IPv4Network, resolver: socket.socket) -> None:
        self._plan = plan
        self._resolver = resolver
        self._home = namespaces.open_namespace("self", "net")
        self._nft = Nftables()
        self._routes = IPRoute()
        self._numbers = itertools.count(1)
        self._offsets = itertools.cycle(range(plan.first, plan.last))
        self._links: dict[int, Link] = {}
        self._used: set[IPv4Address] = set()
        self._groups: dict[str, tuple[int, set[int]]] = {}
        self._group_numbers = itertools.count(1)
        self._uplink = network

    def begin(self) -> None:
        """Make the namespace a router without any sandbox. The uplink is there already."""
        self._nft.run(ruleset.base(self._plan))
        links.forbid_ipv6("all")
        links.forbid_ipv6()
        links.set_sysctl("ipv4/conf/all/rp_filter", "1")
        links.set_sysctl("ipv4/conf/all/send_redirects", "0")
        links.set_sysctl("ipv4/conf/default/send_redirects", "0")
        routes = self._routes
        routes.link("set", index=1, state="up")
        routes.addr("add", index=1, address=str(self._plan.gateway), prefixlen=32)
        (up,) = routes.link_lookup(ifname=ruleset.UPLINK)
        routes.addr("add", index=up, address=str(self._uplink[2]), prefixlen=30)
        routes.link("set", index=up, state="up")
        routes.route("add", dst="0.0.0.0/0", gateway=str(self._uplink[1]), oif=up)
        # Last: nothing is passed on before the rules are there.
        links.set_sysctl("ipv4/ip_forward", "1")

    def serve_dns(self) -> None:
        """Make what the resolver listens on, and give it away."""
        address = (str(self._plan.gateway), DNS_PORT)
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp,
            nflog.bound(ruleset.LOG_GROUP) as log,
        ):
            udp.bind(address)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind(address)
            tcp.listen(DNS_BACKLOG)
            fds = (udp.fileno(), tcp.fileno(), log.fileno())
            protocol.send(self._resolver, {"op": "serve"}, fds)

    # --- the launcher's ----------------------------------------------------------------------

    def attach(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        (netns,) = fds
        policy = policy_of(request["mode"], request["allow"])
        number = next(self._numbers)
        run = request["run"]
        group = self._join(run, number) if run else None
        address = self._free_address()
        link = Link(number, address, policy, group)
        self._links[number] = link
        self._used.add(address)
        try:
            # Rules before the link: there is no moment in which it passes what it must not.
            self._nft.run(ruleset.add_link(link))
            links.add(
                self._routes,
                self._home,
                netns,
                name=link.name,
                address=address,
                gateway=self._plan.gateway,
                bandwidth_mbit=request["bandwidth_mbit"],
            )
            self._tell(
                {
                    "op": "policy",
                    "link": number,
                    "address": str(address),
                    "sandbox": request["sandbox"],
                    "mode": request["mode"],
                    "allow": request["allow"],
                    "group": group,
                    "names": request["names"],
                }
            )
        except BaseException:
            self._remove(link)
            raise
        return {"link": number, "address": str(address), "gateway": str(self._plan.gateway)}

    def detach(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        del fds
        link = self._links.get(int(request["link"]))
        if link is not None:
            self._remove(link)
        return {}

    def _remove(self, link: Link) -> None:
        """Idempotent, and as much as can be: also what ``attach`` had only begun."""
        self._tell({"op": "gone", "link": link.number})
        links.remove(self._routes, link.name)
        with suppress(OSError):
            self._nft.run(ruleset.remove_link(link))
        with suppress(NetlinkError, OSError), NFCTSocket() as connections:
            connections.flush(mark=link.number, mark_mask=0xFFFF_FFFF)
        self._links.pop(link.number, None)
        self._used.discard(link.address)
        for run, (group, members) in list(self._groups.items()):
            members.discard(link.number)
            if not members:
                del self._groups[run]
                with suppress(OSError):
                    self._nft.run(ruleset.remove_group(group))

    def _join(self, run: str, number: int) -> int:
        if run not in self._groups:
            group = next(self._group_numbers)
            self._nft.run(ruleset.add_group(group))
            self._groups[run] = (group, set())
        group, members = self._groups[run]
        members.add(number)
        return group

    def _free_address(self) -> IPv4Address:
        """The one that was free for longest: what others still send to its last holder is late."""
        for _ in range(self._plan.last - self._plan.first):
            address = self._plan.pool[next(self._offsets)]
            if address not in self._used:
                return address
        raise OSError(105, "every address of the pool is in use", str(self._plan.pool))

    # --- the resolver's ----------------------------------------------------------------------

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open what a name led to. The resolver reads what sandboxes send, so it is not believed:
        only ports of the link's own entries, only addresses that a name may lead to."""
        link = self._links.get(int(request["link"]))
        if link is None or link.policy.full:
            return {}
        addresses = [IPv4Address(one) for one in request["addresses"]]
        ports = [Ports(*one) for one in request["ports"]]
        known = ruleset.ports_of_names(link.policy)
        if not all(map(link.policy.may_name_lead_to, addresses)) or not all(
            one in known for one in ports
        ):
            raise OSError(1, "not what this link may be given", link.name)
        timeout_s = max(1, min(OPEN_TIMEOUT_MAX_S, int(request["timeout_s"])))
        if addresses and ports:
            self._nft.run(ruleset.open_addresses(link, addresses, ports, timeout_s))
        return {}

    def _tell(self, message: dict[str, Any]) -> None:
        protocol.send(self._resolver, message)


def main() -> int:
    fold_stderr("router")
    parser = argparse.ArgumentParser(prog="sandboxd.network.router", description=__doc__)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--node-id", type=int, required=True)
    args = parser.parse_args()
    hostd, launcher, resolver = (socket.socket(fileno=fd) for fd in (HOSTD, LAUNCHER, RESOLVER))
    for fd in (HOSTD, LAUNCHER, RESOLVER, USER_NAMESPACE):
        os.set_inheritable(fd, False)
    plan = Plan(parse_pool(args.pool))
    try:
        router = _start(plan, args.instance, args.node_id, resolver)
    except (OSError, NetlinkError) as error:
        # The first request is answered with it: whoever asks for a network is to know why.
        print(f"router: {error}", file=sys.stderr)
        with suppress(OSError):
            protocol.send(launcher, {"event": "failed", "message": str(error)})
        return 1
    _serve(router, hostd, launcher, resolver)
    return 0


def _start(plan: Plan, instance: str, node_id: int, resolver: socket.socket) -> Router:
    network = _connect(plan, instance)
    os.close(USER_NAMESPACE)
    router = Router(plan, network, resolver)
    router.begin()
    router.serve_dns()
    import_whole(_IMPORTED_WHOLE)
    cap.set_securebits(cap.SECBIT_NO_SETUID_FIXUP)
    os.setgroups([])
    os.setresgid(node_id, node_id, node_id)
    os.setresuid(node_id, node_id, node_id)
    kept = (cap.CAP_NET_ADMIN, cap.CAP_SYS_ADMIN)
    cap.drop_bounding(kept)
    cap.capset(cap.mask(kept), cap.mask(kept), 0)
    set_no_new_privs()
    set_dumpable(False)
    return router


def _connect(plan: Plan, instance: str) -> IPv4Network:
    """Enter the namespaces; a child that does not makes the uplink."""
    asked, ask = os.pipe2(os.O_CLOEXEC)
    answered, answer = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _make_uplink(plan, instance, parent, asked, answer)
    os.close(asked)
    os.close(answer)
    with open(answered, "rb") as answers:
        try:
            namespaces.setns(USER_NAMESPACE, namespaces.CLONE_NEWUSER)
            namespaces.unshare(namespaces.CLONE_NEWNET)
            os.write(ask, b"1")
        finally:
            os.close(ask)
        said = answers.read().decode()
    os.waitpid(child, 0)
    if not said.startswith("ok "):
        raise OSError(5, said or "no uplink", "uplink")
    return IPv4Network(said[3:])


def _make_uplink(plan: Plan, instance: str, parent: int, asked: int, answer: int) -> None:
    try:
        if os.read(asked, 1):
            try:
                said = f"ok {uplink.add(instance, plan, parent)}"
            except OSError as error:
                said = str(error)
            os.write(answer, said.encode())
    except BaseException:  # noqa: BLE001 - a forked child must not return into its parent's stack
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(0)


def _serve(
    router: Router, hostd: socket.socket, launcher: socket.socket, resolver: socket.socket
) -> None:
    """Until one of the three is gone."""
    verbs: dict[str, Callable[[dict[str, Any], list[int]], dict[str, Any]]] = {
        "attach": router.attach,
        "detach": router.detach,
        "ping": lambda _message, _fds: {},
    }
    poller = select.poll()
    for sock in (hostd, launcher, resolver):
        poller.register(sock, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd == hostd.fileno():
                return
            sock = launcher if fd == launcher.fileno() else resolver
            try:
                message, fds = protocol.receive(sock)
            except (OSError, ValueError):
                return
            if message is None:
                return
            try:
                if sock is launcher:
                    answer: dict[str, Any] = {"ok": verbs[message["op"]](message, fds)}
                else:
                    answer = {"ok": router.open(message)}
            except (OSError, NetlinkError, ValueError, KeyError, TypeError) as error:
                number = getattr(error, "errno", None) or getattr(error, "code", None) or 22
                print(f"router: {message.get('op')}: {error}", file=sys.stderr)
                answer = {"errno": number, "what": str(error)[:500]}
            finally:
                for one in fds:
                    os.close(one)
            try:
                protocol.send(sock, {"id": message.get("id"), **answer})
            except OSError:
                return


if __name__ == "__main__":
    sys.exit(main())
