"""``python -m sandboxd.network.resolver``: answers sandboxes' DNS, and keeps their egress logs.

fd 3: hostd, whose end of it is the order to end; 4: the launcher, which asks for logs; 5: the
router. It runs in the host's network namespace, so that upstreams are reached as the host reaches
them; what it listens on lies in the router's, and comes from there. It starts as root and becomes
an id that has nothing on the host and that no user namespace maps, before it reads a byte of a
sandbox's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import dns.asyncbackend
import dns.asyncquery
import dns.exception
import dns.message
import dns.resolver

from sandboxd.late_imports import CODECS, import_whole
from sandboxd.launcher import protocol
from sandboxd.linux import nflog, seccomp
from sandboxd.linux.process import set_dumpable, set_no_new_privs
from sandboxd.log_lines import fold_stderr
from sandboxd.network.dns import UDP_BYTES_MAX, Answerer, Client
from sandboxd.network.egress import EgressLog
from sandboxd.network.policy import Ports, parse_upstreams, policy_of
from sandboxd.network.ruleset import ALLOWED

HOSTD: Final = 3
LAUNCHER: Final = 4
ROUTER: Final = 5

UPSTREAM_TIMEOUT_S: Final = 4.0
PENDING_MAX: Final = 1024
"""Queries of all sandboxes that wait for an upstream."""
ROUTER_TIMEOUT_S: Final = 5.0
TCP_IDLE_S: Final = 10.0
TCP_MAX: Final = 256
TCP_QUERIES_MAX: Final = 32
TCP_BYTES_MAX: Final = 4096
READ_AT_ONCE: Final = 64
RESOLV_CONF: Final = "/etc/resolv.conf"
RESOLV_CONF_EVERY_S: Final = 5.0
MEMORY_MAX: Final = 1 << 30

_IMPORTED_WHOLE: Final = (CODECS, "asyncio", "dns")
# Of other systems and other event loops.
_NOT_IMPORTED: Final = frozenset({"_trio", "_trio_backend", "windows_events", "windows_utils"})

_PROTOCOLS: Final = {
    socket.IPPROTO_TCP: "tcp",
    socket.IPPROTO_UDP: "udp",
    socket.IPPROTO_ICMP: "icmp",
}


class Upstreams:
    """Those of the configuration, or the host's, which may change while this runs."""

    def __init__(self, configured: str) -> None:
        self._fixed = parse_upstreams(configured)
        self._read: tuple[tuple[str, int], ...] = ()
        self._read_at = -RESOLV_CONF_EVERY_S
        self._backend = dns.asyncbackend.get_backend("asyncio")

    def _servers(self) -> tuple[tuple[str, int], ...]:
        if self._fixed:
            return self._fixed
        now = time.monotonic()
        if now - self._read_at >= RESOLV_CONF_EVERY_S:
            self._read_at = now
            with suppress(OSError, dns.exception.DNSException):
                found = dns.resolver.Resolver(RESOLV_CONF)
                self._read = tuple((str(one), found.port) for one in found.nameservers)
        return self._read

    async def ask(self, query: dns.message.Message) -> dns.message.Message:
        """The answer of the first that gives one. Raises OSError, DNSException."""
        failure: Exception = OSError(101, "no DNS server is configured", RESOLV_CONF)
        for host, port in self._servers():
            try:
                answer, _ = await dns.asyncquery.udp_with_fallback(
                    query, host, timeout=UPSTREAM_TIMEOUT_S, port=port, backend=self._backend
                )
            except (OSError, dns.exception.DNSException) as error:
                failure = error
            else:
                return answer
        raise failure


class Resolver:
    def __init__(
        self, upstreams: Upstreams, launcher: socket.socket, router: socket.socket
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._launcher = launcher
        self._router = router
        self._answerer = Answerer(upstreams.ask, self._open)
        self._clients: dict[str, Client] = {}
        self._by_link: dict[int, str] = {}
        self._groups: dict[int, dict[str, set[str]]] = {}
        self._logs: dict[str, EgressLog] = {}
        self._ids = itertools.count(1)
        self._opening: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0

    # --- what the router says ----------------------------------------------------------------

    def told(self, message: dict[str, Any], fds: list[int]) -> None:
        op = message.get("op")
        if op == "serve":
            self._serve(*(socket.socket(fileno=fd) for fd in fds))
        elif op == "policy":
            self._add(message)
        elif op == "gone":
            self._remove(int(message["link"]))
        else:
            self._opened(message)

    def _add(self, message: dict[str, Any]) -> None:
        group = None
        if message["group"] is not None:
            group = self._groups.setdefault(int(message["group"]), {})
            for name in message["names"]:
                group.setdefault(name, set()).add(message["address"])
        sandbox = message["sandbox"]
        self._clients[message["address"]] = Client(
            int(message["link"]),
            sandbox,
            policy_of(message["mode"], message["allow"]),
            group,
            self._logs.setdefault(sandbox, EgressLog()),
        )
        self._by_link[int(message["link"])] = message["address"]

    def _remove(self, link: int) -> None:
        address = self._by_link.pop(link, None)
        if address is None:
            return
        client = self._clients.pop(address)
        if client.group is not None:
            for name in list(client.group):
                client.group[name].discard(address)
                if not client.group[name]:
                    del client.group[name]
        for number in [n for n, group in self._groups.items() if not group]:
            if not any(one.group is self._groups[number] for one in self._clients.values()):
                del self._groups[number]

    async def _open(
        self, link: int, addresses: Sequence[str], ports: Sequence[Ports], timeout_s: int
    ) -> None:
        number = next(self._ids)
        opened: asyncio.Future[None] = self._loop.create_future()
        self._opening[number] = opened
        asked = {
            "id": number,
            "op": "open",
            "link": link,
            "addresses": list(addresses),
            "ports": [[one.protocol, one.first, one.last] for one in ports],
            "timeout_s": timeout_s,
        }
        try:
            protocol.send(self._router, asked)
            await asyncio.wait_for(opened, ROUTER_TIMEOUT_S)
        finally:
            self._opening.pop(number, None)

    def _opened(self, message: dict[str, Any]) -> None:
        opened = self._opening.pop(int(message.get("id") or 0), None)
        if opened is None or opened.done():
            return
        if "errno" in message:
            opened.set_exception(OSError(message["errno"], str(message["what"]), "router"))
        else:
            opened.set_result(None)

    # --- what the launcher asks --------------------------------------------------------------

    def asked(self, message: dict[str, Any], fds: list[int]) -> None:
        del fds
        sandbox = str(message["sandbox"])
        answer: dict[str, Any] = {}
        if message["op"] == "egress":
            log = self._logs.get(sandbox) or EgressLog()
            answer = log.page(int(message["after"]), int(message["limit"]))
            while len(json.dumps(answer)) > protocol.MESSAGE_MAX // 2:
                answer["entries"] = answer["entries"][: len(answer["entries"]) // 2]
                answer["more"] = True
        elif message["op"] == "forget":
            self._logs.pop(sandbox, None)
        with suppress(BlockingIOError):  # it is told in time or its request ends by time
            protocol.send(self._launcher, {"id": message["id"], "ok": answer})

    # --- what sandboxes send -----------------------------------------------------------------

    def _serve(self, udp: socket.socket, tcp: socket.socket, log: socket.socket) -> None:
        for sock in (udp, tcp, log):
            sock.setblocking(False)
        self._loop.add_reader(udp.fileno(), self._readable, udp)
        self._loop.add_reader(log.fileno(), self._logged, log)
        self._spawn(self._serve_tcp(tcp))

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _readable(self, udp: socket.socket) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                wire, source = udp.recvfrom(TCP_BYTES_MAX)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                continue
            if len(self._tasks) < PENDING_MAX:
                self._spawn(self._answer_datagram(udp, wire, source))

    async def _answer_datagram(
        self, udp: socket.socket, wire: bytes, source: tuple[str, int]
    ) -> None:
        client = self._clients.get(source[0])
        if client is None:
            return
        answer = await self._answerer.answer(client, wire, UDP_BYTES_MAX)
        if answer is not None and self._clients.get(source[0]) is client:
            with suppress(OSError):
                udp.sendto(answer, source)

    async def _serve_tcp(self, tcp: socket.socket) -> None:
        server = await asyncio.start_server(self._talk, sock=tcp, limit=TCP_BYTES_MAX)
        async with server:
            await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")[0]
        self._connections += 1
        try:
            for _ in range(TCP_QUERIES_MAX if self._connections <= TCP_MAX else 0):
                async with asyncio.timeout(TCP_IDLE_S):
                    length = int.from_bytes(await reader.readexactly(2), "big")
                    if length > TCP_BYTES_MAX:
                        return
                    wire = await reader.readexactly(length)
                    client = self._clients.get(address)
                    if client is None:
                        return
                    answer = await self._answerer.answer(client, wire, 65_535)
                    if answer is None:
                        return
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections -= 1
            writer.transport.abort()

    def _logged(self, log: socket.socket) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                datagram = log.recv(1 << 17)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                continue  # ENOBUFS: what came faster than it was read is not logged
            for packet in nflog.parse(datagram):
                client = self._clients.get(packet.source)
                if client is not None:
                    kind = _PROTOCOLS.get(packet.protocol, str(packet.protocol))
                    client.log.connection(
                        packet.prefix == ALLOWED, kind, packet.destination, packet.port
                    )


def _become(identity: int) -> None:
    os.setgroups([])
    os.setresgid(identity, identity, identity)
    os.setresuid(identity, identity, identity)
    set_no_new_privs()
    set_dumpable(False)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def main() -> int:
    fold_stderr("resolver")
    parser = argparse.ArgumentParser(prog="sandboxd.network.resolver", description=__doc__)
    parser.add_argument("--id", type=int, required=True)
    parser.add_argument("--upstreams", default="")
    args = parser.parse_args()
    hostd, launcher, router = (socket.socket(fileno=fd) for fd in (HOSTD, LAUNCHER, ROUTER))
    for sock in (hostd, launcher, router):
        sock.set_inheritable(False)
        sock.setblocking(False)
    upstreams = Upstreams(args.upstreams)
    program = seccomp.compile_profile(seccomp.RESOLVER_PROFILE)
    import_whole(_IMPORTED_WHOLE, _NOT_IMPORTED)
    _become(args.id)
    seccomp.load(program)
    with suppress(KeyboardInterrupt):
        asyncio.run(_run(upstreams, hostd, launcher, router))
    return 0


async def _run(
    upstreams: Upstreams, hostd: socket.socket, launcher: socket.socket, router: socket.socket
) -> None:
    """Until one of the three is gone."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    resolver = Resolver(upstreams, launcher, router)

    def take(sock: socket.socket, handle: Callable[[dict[str, Any], list[int]], None]) -> None:
        try:
            message, fds = protocol.receive(sock)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message, fds = None, []
        if message is None:
            loop.remove_reader(sock.fileno())
            ended.set()
            return
        handle(message, fds)

    loop.add_reader(hostd.fileno(), ended.set)
    loop.add_reader(router.fileno(), take, router, resolver.told)
    loop.add_reader(launcher.fileno(), take, launcher, resolver.asked)
    await ended.wait()


if __name__ == "__main__":
    sys.exit(main())
