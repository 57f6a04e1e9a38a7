"""The launcher's ends of the sockets to router and resolver, and which sandbox has which link.

Both are started by the first sandbox that asks for a network, so that a node without one has
neither process. When either dies every link dies with it; the sandboxes that had one get one of the
same kind from their successors, at once, and have no network meanwhile.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.errors import NetworkUnavailable
from sandboxd.guard import Silence
from sandboxd.host.client import HostClient
from sandboxd.launcher import protocol
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.launcher.slots import Slot
from sandboxd.network.policy import parse_pool
from sandboxd.network.ruleset import Plan

START_TIMEOUT_S: Final = 120.0
"""For the first answer of a router: two Python programs start before it, on a node that may be
busy with something else. One that dies instead is noticed at once."""
ANSWER_TIMEOUT_S: Final = 20.0
"""For every other."""
AGAIN_PAUSE_S: Final = 0.5
AGAIN_MAX: Final = 60

_REFUSED: Final = 95  # EOPNOTSUPP


@dataclass(eq=False, slots=True)
class Attachment:
    """One sandbox's network, for as long as its slot lives."""

    request: dict[str, Any]
    """``attach`` of the router, to be sent again to its successor."""
    slot: Slot
    link: int = 0
    address: str = ""
    gone: bool = False


class Networks:
    def __init__(self, loop: Loop, host: HostClient, pool: str, hang_s: float) -> None:
        """``pool``: the router's addresses; empty where there is none. ``hang_s``: how long either
        may not answer; 0: for ever."""
        self._loop = loop
        self._host = host
        self._hang_s = hang_s
        self.resolv_conf = f"nameserver {Plan(parse_pool(pool)).gateway}\n" if pool else ""
        """What /etc/resolv.conf of a sandbox with a network holds."""
        self._peers: Promise[tuple[_Peer, _Peer]] | None = None
        self._attached: set[Attachment] = set()

    def attach(self, slot: Slot, request: dict[str, Any]) -> Task[Attachment]:
        """Give a slot's namespace a link; ``request``: sandbox, mode, allow, bandwidth_mbit, run,
        names.

        Raises NetworkUnavailable.
        """
        attachment = Attachment(request, slot)
        self._attached.add(attachment)
        try:
            yield from self._attach(attachment)
        except BaseException:
            self.detach(attachment)
            raise
        return attachment

    def _attach(self, attachment: Attachment) -> Task[None]:
        slot = attachment.slot
        try:
            netns = yield from self._host.netns_fd(slot.pid, slot.pidfd)
            try:
                router, _ = yield from self._connected()
                answer = yield from router.ask("attach", (netns,), **attachment.request)
            finally:
                os.close(netns)
        except OSError as error:
            raise _unavailable(error) from error
        attachment.link, attachment.address = int(answer["link"]), str(answer["address"])
        if attachment.gone:  # while it was made
            self._drop(attachment)

    def detach(self, attachment: Attachment | None) -> None:
        """Take the link away; nothing is waited for. Idempotent."""
        if attachment is None or attachment.gone:
            return
        attachment.gone = True
        self._attached.discard(attachment)
        if attachment.link:
            self._drop(attachment)

    def _drop(self, attachment: Attachment) -> None:
        peers = self._peers
        if peers is not None and peers.value is not None:
            router, _ = peers.value
            self._loop.spawn(router.ask("detach", link=attachment.link))

    def egress(self, sandbox: str, after: int, limit: int) -> Task[dict[str, Any]]:
        """What the resolver has of a sandbox's log. Raises NetworkUnavailable."""
        if self._peers is None:
            return {"entries": [], "counts": {}, "more": False}
        try:
            _, resolver = yield from self._connected()
            return (yield from resolver.ask("egress", sandbox=sandbox, after=after, limit=limit))
        except OSError as error:
            raise _unavailable(error) from error

    def forget(self, sandbox: str) -> None:
        """A sandbox is deleted: its log goes."""
        if self._peers is not None and self._peers.value is not None:
            self._loop.spawn(self._peers.value[1].ask("forget", sandbox=sandbox))

    def _connected(self) -> Task[tuple[_Peer, _Peer]]:
        if self._peers is None:
            self._peers = self._loop.spawn(self._connect())
        peers = self._peers
        try:
            return (yield from self._loop.wait(peers, START_TIMEOUT_S, "the network's start"))
        except BaseException:
            if self._peers is peers:
                self._peers = None  # the next one tries again
            raise

    def _connect(self) -> Task[tuple[_Peer, _Peer]]:
        fds = yield from self._host.network()
        router, resolver = (
            _Peer(self._loop, socket.socket(fileno=fd), name, self._lost)
            for fd, name in zip(fds, ("router", "resolver"), strict=True)
        )
        for peer in (router, resolver) if self._hang_s else ():
            self._loop.spawn(peer.watch(self._hang_s))
        return router, resolver

    def _lost(self, peer: _Peer) -> None:
        """Either has died: let go of both and, where somebody has a link, begin anew."""
        if self._peers is None or self._peers.value is None or peer not in self._peers.value:
            return
        peers, self._peers = self._peers.value, None
        for one in peers:
            one.close()
        for attachment in self._attached:
            attachment.link = 0
        if self._attached:
            print(f"launcher: the {peer.name} died; its links are made anew", file=sys.stderr)
            self._loop.spawn(self._attach_again())

    def _attach_again(self) -> Task[None]:
        """A namespace is taken down behind its last process: until then the old link's other end,
        and its name, are still in the sandbox."""
        for _ in range(AGAIN_MAX):
            yield from self._loop.sleep(AGAIN_PAUSE_S)
            for attachment in self._unlinked():
                try:
                    yield from self._attach(attachment)
                except (NetworkUnavailable, TimeoutError) as error:
                    print(f"launcher: no network again yet: {error}", file=sys.stderr)
            if not self._unlinked():
                return

    def _unlinked(self) -> list[Attachment]:
        return [
            one
            for one in self._attached
            if not one.gone and not one.link and not one.slot.dead.settled
        ]


def _unavailable(error: OSError) -> NetworkUnavailable:
    if error.errno == _REFUSED:
        return NetworkUnavailable(
            f"this node gives no network: {error.strerror}",
            hint="see `sandboxd doctor`; network none works",
        )
    return NetworkUnavailable(f"the network could not be made: {error.strerror or error}")


class _Peer:
    """One socket: requests by id, each settled by its answer."""

    def __init__(
        self, loop: Loop, sock: socket.socket, name: str, on_end: Callable[[_Peer], None]
    ) -> None:
        self._loop = loop
        self._sock: socket.socket | None = sock
        self.name = name
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._pending: dict[int, Promise[dict[str, Any]]] = {}
        self._timeout_s = START_TIMEOUT_S
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)

    def ask(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> Task[dict[str, Any]]:
        """The answer. Raises OSError: the peer's, EPIPE when it is gone, ETIMEDOUT."""
        if self._sock is None:
            raise BrokenPipeError(32, f"the {self.name} is gone")
        number = next(self._ids)
        promise: Promise[dict[str, Any]] = Promise()
        self._pending[number] = promise
        try:
            protocol.send(self._sock, {"id": number, "op": op, **fields}, fds)
            return (yield from self._loop.wait(promise, self._timeout_s, f"the {self.name}"))
        except TimeoutError as error:
            raise OSError(110, f"the {self.name} does not answer", self.name) from error
        finally:
            self._pending.pop(number, None)

    def watch(self, limit_s: float) -> Task[None]:
        """Until it is gone: see whether it answers, and take it for dead where it does not for so
        long. Its successor's start ends it."""
        silence = Silence(limit_s)
        starts_until = time.monotonic() + START_TIMEOUT_S
        answer = self._ping()
        while self._sock is not None:
            yield from self._loop.sleep(silence.tick_s)
            if answer.settled:
                if answer.error is None:  # else its socket was full
                    silence.broken()
                    starts_until = 0.0
                answer = self._ping()
            elif time.monotonic() < starts_until:
                silence.broken()
            if silence.lasts() and silence.is_too_long and self._sock is not None:
                print(
                    f"launcher: the {self.name} does not answer for {limit_s:g} s", file=sys.stderr
                )
                self._end(OSError(110, f"the {self.name} does not answer", self.name))

    def _ping(self) -> Promise[dict[str, Any]]:
        number = next(self._ids)
        promise = self._pending[number] = Promise()
        try:
            if self._sock is not None:
                protocol.send(self._sock, {"id": number, "op": "ping", "sandbox": ""})
        except OSError as error:
            del self._pending[number]
            promise.reject(error)
        return promise

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            message, fds = protocol.receive(self._sock)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message, fds = None, []
        for fd in fds:
            os.close(fd)
        if message is None:
            self._end(BrokenPipeError(32, f"the {self.name} died"))
        elif message.get("event") == "failed":
            self._end(OSError(5, str(message.get("message")), self.name))
        else:
            self._timeout_s = ANSWER_TIMEOUT_S
            promise = self._pending.pop(message.get("id", 0), None)
            if promise is None:
                return
            if "errno" in message:
                promise.reject(OSError(message["errno"], str(message["what"]), self.name))
            else:
                promise.resolve(message["ok"])

    def _end(self, error: OSError) -> None:
        self.close(error)
        self._on_end(self)

    def close(self, error: OSError | None = None) -> None:
        if self._sock is None:
            return
        self._loop.remove_reader(self._sock.fileno())
        with suppress(OSError):
            self._sock.close()
        self._sock = None
        pending, self._pending = self._pending, {}
        for promise in pending.values():
            promise.reject(error or BrokenPipeError(32, f"the {self.name} is gone"))
