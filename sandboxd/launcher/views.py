"""The proc views, from the launcher: the server's supervision, and what each sandbox is shown.

A slot gets its files when it is made, before anyone knows what it will be; the server is told the
limits when a sandbox takes the slot, one message and nothing waited for. The mounts are made by the
prober, which may block, and put in place by PID 1, which asks no file system for it: a server that
hangs holds up neither a create nor a delete.

When the server dies, what reads through it fails at once (ENOTCONN). A new one is started, told of
every slot there is, and its files are bound in the place of the dead ones: running sandboxes heal.
A server that does not answer is killed first; that frees who waits for it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sandboxd.cpu_list import parse_cpu_list
from sandboxd.errors import SandboxdError
from sandboxd.init.protocol import close_fds
from sandboxd.launcher import cpus, protocol
from sandboxd.launcher.cpus import Cpus, Share
from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.linux.cgroup_limits import quota_us
from sandboxd.model import Limits
from sandboxd.rootfs import skeleton

if TYPE_CHECKING:
    from sandboxd.launcher.slots import Slot

START_TIMEOUT_S: Final = 10.0
BIND_TIMEOUT_S: Final = 5.0
BIND_PATIENCE_S: Final = 0.3
"""How long the making of a slot waits for its views; they come later then."""
CHECK_EVERY_S: Final = 1.0
CHECK_TIMEOUT_S: Final = 4.0
"""A server that has not answered one statfs in this time is killed: its readers cannot be."""
PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 30.0
LIVED_S: Final = 10.0
"""One that ran for so long died of something else than its start."""


@dataclass(eq=False, slots=True)
class View:
    """What one slot is shown. ``name`` is a secret without meaning: mountinfo shows it."""

    slot: Slot
    name: str
    told: dict[str, Any] | None = None
    share: Share | None = None


class Views:
    def __init__(
        self,
        loop: Loop,
        *,
        enabled: bool,
        start_server: Callable[[str], Task[tuple[int, int]]],
        mount_dir: str,
        mounter: Lanes,
        prober: Lanes,
        cpus: Cpus,
        disk_is_memory: bool,
    ) -> None:
        """``disk_is_memory``: writable layers are tmpfs."""
        self._loop = loop
        self._enabled = enabled
        self._start_server = start_server
        self._mount_dir = mount_dir
        self._mounter = mounter
        self._prober = prober
        self._cpus = cpus
        self._disk_is_memory = disk_is_memory
        self._views: dict[Slot, View] = {}
        self._server: _Server | None = None
        self._lives = 0
        self.attached: set[str] = set()
        """Names of servers' mounts, beside those of the images."""
        self.first: Promise[None] = Promise()
        """Settled once the first server serves, or has failed to."""
        if not enabled:
            self.first.resolve(None)

    @property
    def state(self) -> str:
        """``off`` (not configured), ``serving`` or ``down``."""
        if not self._enabled:
            return "off"
        return "down" if self._server is None else "serving"

    # --- slots -------------------------------------------------------------------------------

    def add(self, slot: Slot) -> Promise[None]:
        """Have a slot shown its files once it is set up; the promise is for ``wait``."""
        if self._enabled:
            view = View(slot, secrets.token_hex(8))
            self._views[slot] = view
            slot.dead.watch(lambda: self._drop(view))
            if self._server is not None:
                return self._loop.spawn(self._bind(view, self._server))
        nothing: Promise[None] = Promise()
        nothing.resolve(None)
        return nothing

    def wait(self, bound: Promise[None]) -> Task[None]:
        """Until a slot has its files, but not for long: they come later then."""
        with suppress(TimeoutError):
            yield from self._loop.wait(bound, BIND_PATIENCE_S, "its views")

    def tell(self, slot: Slot, limits: Limits) -> None:
        """What the sandbox that takes this slot may use; its CPUs are chosen and set here."""
        view = self._views.get(slot)
        if view is None:
            return
        within = parse_cpu_list(limits.cpuset) if limits.cpuset else ()
        view.share = self._cpus.take(limits.cpus, within)
        if view.share.cpus != self._cpus.all:
            cpus.bind(slot.pid, view.share.cpus)
        view.told = {
            "op": "tell",
            "name": view.name,
            "cpus": view.share.cpus,
            "memory_kb": limits.memory_mb * 1024,
            "disk_kb": limits.disk_mb * 1024 * self._disk_is_memory,
            "started_s": time.clock_gettime(time.CLOCK_BOOTTIME),
            "started_at": time.time(),
            "quota_us": quota_us(limits.cpus),
            "cpu_weight": limits.cpu_weight,
            "pids": limits.pids,
        }
        if self._server is not None:
            self._server.send(view.told)

    def _drop(self, view: View) -> None:
        self._views.pop(view.slot, None)
        if view.share is not None:
            self._cpus.give_back(view.share)
        if self._server is not None:
            self._server.send({"op": "drop", "name": view.name})

    def _bind(self, view: View, server: _Server) -> Task[None]:
        """Whatever fails here, the next server's start does it again."""
        names, fds = _figures(view.slot)
        server.send({"op": "add", "name": view.name, "files": names}, fds)
        close_fds(fds)
        if view.told is not None:
            server.send(view.told)
        trees = self._prober.request(
            "view-trees",
            lanes=(server.name,),
            directory=f"{server.name}/{view.name}",
            names=[name for name, _ in skeleton.VIEWS],
        )
        try:
            reply = yield from self._loop.wait(trees, BIND_TIMEOUT_S, "the view server")
            try:
                yield view.slot.set_up
                done = view.slot.pid1.bind_views(reply.fds)
            finally:
                reply.close()
            yield from view.slot.pid1.check(done, "its views")
        except TimeoutError:
            server.kill()
        except (OSError, SandboxdError) as error:
            if not view.slot.dead.settled and server is self._server:
                print(f"launcher: views of {view.slot.name}: {error}", file=sys.stderr)

    # --- the server --------------------------------------------------------------------------

    def supervise(self) -> Task[None]:
        """For ever: have a server."""
        pause = PAUSE_FIRST_S
        while self._enabled:
            began = time.monotonic()
            try:
                yield from self._live()
            except (OSError, TimeoutError) as error:
                print(f"launcher: the view server: {error}", file=sys.stderr)
            self.first.resolve(None)
            long = time.monotonic() - began > LIVED_S
            pause = PAUSE_FIRST_S if long else min(2 * pause, PAUSE_MAX_S)
            yield from self._loop.sleep(pause)

    def _live(self) -> Task[None]:
        """One life of a server, from its start to its end."""
        self._lives += 1
        name = f"p{self._lives}"
        path = f"{self._mount_dir}/{name}"
        os.mkdir(path, 0o755)
        self.attached.add(name)
        server: _Server | None = None
        try:
            sock, pidfd = yield from self._start_server(path)
            server = _Server(self._loop, name, socket.socket(fileno=sock), pidfd)
            yield from self._loop.wait(server.serving, START_TIMEOUT_S, "its first answer")
            self._server = server
            self.first.resolve(None)
            for view in list(self._views.values()):
                bound = self._loop.spawn(self._bind(view, server))
                if view.slot.set_up.settled:
                    yield bound
            yield from self._watch(server)
        finally:
            self._server = None
            if server is not None:
                server.kill()
                server.close()
            done = self._mounter.request("unmount", lanes=(name,), name=name)
            done.watch(lambda: self.attached.discard(name))

    def _watch(self, server: _Server) -> Task[None]:
        """Until it is dead, or has been killed because it does not answer."""
        while not server.dead.settled:
            reply = self._prober.request("fuse-check", lanes=(server.name,), name=server.name)
            try:
                yield from self._loop.wait(reply, CHECK_TIMEOUT_S, "statfs")
            except OSError:
                return  # its mount says that it is gone
            with suppress(TimeoutError):
                yield from self._loop.wait(server.dead, CHECK_EVERY_S, "its death")


class _Server:
    """One view server: its socket and its pidfd, both taken over."""

    def __init__(self, loop: Loop, name: str, sock: socket.socket, pidfd: int) -> None:
        self._loop = loop
        self.name = name
        self._sock = sock
        self._pidfd = pidfd
        self._unsent: deque[tuple[dict[str, Any], tuple[int, ...]]] = deque()
        self.serving: Promise[None] = Promise()
        self.dead: Promise[None] = Promise()
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)
        loop.add_reader(pidfd, self._died)

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Without waiting: what does not fit its socket waits here. The fds may be closed."""
        if self.dead.settled:
            return
        if not self._unsent:
            try:
                protocol.send(self._sock, message, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._writable)
            except OSError:
                return  # its death is told by the pidfd
            else:
                return
        self._unsent.append((message, tuple(os.dup(fd) for fd in fds)))

    def _writable(self) -> None:
        while self._unsent:
            message, fds = self._unsent[0]
            try:
                protocol.send(self._sock, message, fds)
            except BlockingIOError:
                return
            except OSError:
                break
            self._unsent.popleft()
            close_fds(fds)
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            message, fds = protocol.receive(self._sock)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message, fds = None, []
        close_fds(fds)
        if message is None:
            self._loop.remove_reader(self._sock.fileno())
            self.kill()
        elif message.get("event") == "serving":
            self.serving.resolve(None)

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.dead.resolve(None)
        self.serving.reject(BrokenPipeError(32, "it died; what it said above tells why"))

    def kill(self) -> None:
        # Before it has joined the node's user namespace it is root's: hostd ends it then.
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._loop.remove_reader(self._pidfd)
        self._sock.close()
        os.close(self._pidfd)
        for _, fds in self._unsent:
            close_fds(fds)
        self._unsent.clear()
        self.dead.resolve(None)


def _figures(slot: Slot) -> tuple[list[str], tuple[int, ...]]:
    """The server's names of the cgroup files that tell what a slot uses, and those open."""
    groups = slot.cgroups
    v1, v2 = groups.v1, groups.v2
    if v2 is None:
        return [], ()
    controllers = groups.node.v2_controllers
    files = {"cpu.stat": f"{v2}/cpu.stat"}
    if "memory" in v1:
        files["memory.usage"] = f"{v1['memory']}/memory.usage_in_bytes"
        files["memory.stat"] = f"{v1['memory']}/memory.stat"
    elif "memory" in controllers:
        files["memory.usage"] = f"{v2}/memory.current"
        files["memory.stat"] = f"{v2}/memory.stat"
    if "pids" in v1 or "pids" in controllers:
        files["pids"] = f"{v1.get('pids', v2)}/pids.current"
    opened: dict[str, int] = {}
    for name, path in files.items():
        with suppress(OSError):  # one that this kernel lacks, or a slot that is gone
            opened[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return list(opened), tuple(opened.values())
