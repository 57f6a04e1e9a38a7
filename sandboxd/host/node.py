"""One life of a node: launcher and zygote started, the launcher served, everything ended.

Start, in this order:
  1. cgroups, emptied of what a node that was killed left in them;
  2. the launcher, as root until it has made the node's user namespace under the owner's id; its id
     maps are written from here, since it has no right to them any more;
  3. the zygote, which joins the namespaces that the launcher made. Both are put into the node's
     cgroup before they make anything.
Whoever of the two dies takes the node with it: every sandbox hangs on both.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from sandboxd.errors import NodeError
from sandboxd.guard import Silence
from sandboxd.host.cgroups import NODE, make_node_cgroups, remove_node_cgroups
from sandboxd.host.ids import FUSE_ID, MAPPED_IDS, NODE_ID, SANDBOX_IDS, NodeIds
from sandboxd.host.images import KernelImages
from sandboxd.host.layers import LoopLayers
from sandboxd.host.network import RESOLVER, ROUTER, HostNetwork, NetworkSettings
from sandboxd.host.openers import Openers
from sandboxd.init.protocol import close_fds
from sandboxd.launcher import protocol
from sandboxd.launcher.cgroups import NodeCgroups
from sandboxd.linux import cgroup, namespaces
from sandboxd.linux.process import raise_priority
from sandboxd.log_lines import VARIABLE
from sandboxd.model import KernelCaps, MountRoot

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0

MFD_EXEC: Final = 0x0010  # linux/memfd.h

PING: Final = b'{"ping": true}'
"""To the launcher, whose answer says no more."""

INIT_BINARY: Final = Path(__file__).parent.parent / "init" / "sandbox_init"


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What hostd needs of the configuration."""

    ids: NodeIds
    runtime_dir: str
    cgroup_name: str
    squashfuse: str
    proc_views: bool
    slots_min: int
    slots_max: int
    slots_primed: int
    token_file: str
    sweep_s: float
    hang_s: float
    """How long a part of the node may not answer before it is killed; 0: for ever."""
    writable_layer: str
    """``tmpfs``, or ``ext4`` where only that can be an overlay's upper."""
    overlay_detached: bool
    """Overlayfs takes layers that are attached nowhere."""
    layers_dir: str
    """Where the disk space of ``ext4`` layers is taken from."""
    describe: Mapping[str, Any]
    """What the launcher's ``node`` verb answers, for the daemon."""
    network: NetworkSettings = field(default_factory=NetworkSettings)
    mount_roots: tuple[MountRoot, ...] = ()
    kernel_caps: KernelCaps = field(default_factory=KernelCaps)
    images_dir: str = ""
    image_backend: str = "fuse"
    """``fuse``, or ``kernel``: who serves images."""


class Node:
    """One running launcher with its zygote."""

    def __init__(self, settings: NodeSettings, listener: socket.socket) -> None:
        self.settings = self._settings = settings
        self._undo = ExitStack()
        self._listener = listener
        self._cgroups: NodeCgroups | None = None
        self._pidfds: dict[int, tuple[str, int]] = {}
        self._layers = LoopLayers(settings.layers_dir, settings.ids.base)
        self.sock: socket.socket
        self._launcher_pid = 0
        self._silence = Silence(settings.hang_s)
        self._view_server: tuple[int, int] | None = None
        """Its pid and pidfd. The launcher watches it: without it the node still serves."""
        self._openers = Openers(settings.mount_roots)
        self._images = KernelImages(settings.images_dir)
        self._network = HostNetwork(settings.network, settings.ids, settings.cgroup_name)

    def start(self) -> None:
        """Bring the node up to where it serves. Raises NodeError, OSError; ``stop`` cleans up."""
        self._cgroups = self._make_cgroups()
        self._network.stop()  # what a hostd that was killed left on the host
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote_ours, zygote_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock = ours
        self._undo.enter_context(ours)
        with theirs, zygote_ours, zygote_theirs:
            ours.settimeout(START_TIMEOUT_S)
            self._launcher_pid = self._start(
                "launcher",
                [sys.executable, "-m", "sandboxd.launcher"],
                [theirs.fileno(), self._listener.fileno(), zygote_ours.fileno()],
            )
            protocol.send(ours, self._orders())
            self._expect("maps")
            self._map_ids()
            protocol.send(ours, {"go": "maps"})
            self._expect("namespaces")
            user, mnt = self._namespace("user"), self._namespace("mnt")
            program = _sealed_copy(INIT_BINARY)
            try:
                self._start(
                    "zygote",
                    # Every sandbox reads PID 1's command line: no path of the host in it.
                    ["init", "zygote"],
                    [zygote_theirs.fileno(), user, mnt],
                    path=f"/proc/self/fd/{program}",
                )
            finally:
                for fd in (user, mnt, program):
                    os.close(fd)
        theirs.close()
        zygote = next(fd for fd, (name, _) in self._pidfds.items() if name == "zygote")
        protocol.send(ours, {"go": "zygote"}, (zygote,))
        self._expect("ready")
        # By now its workers are there, which do not need it.
        raise_priority(self._launcher_pid)
        ours.settimeout(None)
        self._silence = Silence(self._settings.hang_s)

    def _make_cgroups(self) -> NodeCgroups | None:
        settings = self._settings
        return make_node_cgroups(
            settings.cgroup_name, settings.ids.node, io=settings.writable_layer == "ext4"
        )

    def _remove_cgroups(self, groups: NodeCgroups) -> None:
        remove_node_cgroups(groups)

    def _map_ids(self) -> None:
        """Of the user namespace that the launcher has made, as its owner."""
        maps = [(0, self._settings.ids.base, MAPPED_IDS)]
        namespaces.write_id_map(self._launcher_pid, maps, maps)

    def _namespace(self, name: Literal["user", "mnt"]) -> int:
        """Of the node; the caller's to close."""
        return namespaces.open_namespace(self._launcher_pid, name)

    def _orders(self) -> dict[str, Any]:
        settings, groups = self._settings, self._cgroups
        return {
            "owner": settings.ids.owner,
            "node_id": NODE_ID,
            "fuse_id": FUSE_ID,
            "sandbox_ids": SANDBOX_IDS,
            "sandbox_last_id": 0,
            "mount_dir": f"{settings.runtime_dir}/mnt",
            "squashfuse": settings.squashfuse,
            "image_backend": settings.image_backend,
            "proc_views": settings.proc_views,
            "slots_min": settings.slots_min,
            "slots_max": settings.slots_max,
            "sweep_s": settings.sweep_s,
            "hang_s": settings.hang_s,
            # A root ahead of need takes its disk space ahead of need.
            "slots_primed": settings.slots_primed if settings.writable_layer == "tmpfs" else 0,
            "writable_layer": settings.writable_layer,
            "overlay_detached": settings.overlay_detached,
            "kernel_caps": asdict(settings.kernel_caps),
            "network_pool": settings.network.pool,
            "cgroups": groups
            and {
                "v2": str(groups.v2),
                "v1": {name: str(path) for name, path in groups.v1.items()},
                "v2_controllers": sorted(groups.v2_controllers),
                "watched": groups.watched,
            },
            "describe": dict(settings.describe),
        }

    def _start(
        self, name: str, argv: Sequence[str], fds: Sequence[int], path: str | None = None
    ) -> int:
        """Spawn a process whose end is that of the node."""
        pid, pidfd = self._spawn(argv, fds, path)
        self._pidfds[pidfd] = (name, pid)
        # PID 1 of every sandbox inherits it, and a command's score cannot be raised above PID 1's
        # for good: what a service manager set for hostd (OOMScoreAdjust=) is not for them.
        if name == "zygote" and os.geteuid() == 0:
            Path(f"/proc/{pid}/oom_score_adj").write_text("0", encoding="utf-8")
        return pid

    def _spawn(
        self, argv: Sequence[str], fds: Sequence[int], path: str | None = None
    ) -> tuple[int, int]:
        """Start a process with ``fds`` as 3, 4, … and nothing else open; in the node's cgroup.

        Its pid and pidfd.
        """
        # Copies above the targets first: a target number may be one of the sources.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(fds)) for fd in fds]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            *((os.POSIX_SPAWN_DUP2, fd, 3 + i) for i, fd in enumerate(high)),
        ]
        passed = {"PATH", "LANG", "PYTHONPATH"}
        if argv[0] == sys.executable:
            passed.add(VARIABLE)  # not of the zygote, whose environment every PID 1 has
        env = {k: v for k, v in os.environ.items() if k in passed}
        try:
            pid = os.posix_spawn(
                path or argv[0], list(argv), env, file_actions=actions, setsigmask=[]
            )
        finally:
            for fd in high:
                os.close(fd)
        pidfd = os.pidfd_open(pid)
        if self._cgroups is not None and self._cgroups.v2 is not None:
            cgroup.add_process(self._cgroups.v2 / NODE, pid)
        return pid, pidfd

    def _expect(self, event: str) -> None:
        while True:
            try:
                message, fds = protocol.receive(self.sock)
            except TimeoutError:
                raise NodeError(f"the launcher did not get to {event!r}") from None
            close_fds(fds)
            if message is None or "verb" not in message:
                break
            self._obey(message)
        if message is None or message.get("event") != event:
            why = (message or {}).get("message", "it died; its log says why")
            raise NodeError(f"the launcher failed before {event!r}: {why}")

    @property
    def cgroups(self) -> frozenset[Path]:
        """Its directories in every hierarchy."""
        groups = self._cgroups
        return frozenset() if groups is None else frozenset(groups.directories)

    def watched(self) -> list[int]:
        return [self.sock.fileno(), *self._pidfds, *self._openers.pidfds, *self._images.pidfds]

    def serve(self, fd: int) -> bool:
        """Handle what ``fd`` has; False when the node has failed."""
        if fd in self._openers.pidfds:
            self._openers.ended(fd)
            return True
        if fd in self._images.pidfds:
            self._images.ended(fd)
            return True
        if fd in self._pidfds:
            name = self._pidfds[fd][0]
            print(f"hostd: the {name} died", file=sys.stderr)
            if name in (ROUTER, RESOLVER):
                # The node lives without: the launcher asks for both anew.
                self._end({name}, 0.0)
                return True
            return False
        try:
            message, fds = protocol.receive(self.sock)
        except ConnectionResetError:
            return False  # it died with something unread
        try:
            if message is None:
                return False
            self._obey(message, fds)
        except BrokenPipeError:
            return False  # it died before it was answered
        else:
            return True
        finally:
            close_fds(fds)

    def ask_launcher(self) -> bool:
        """Once a tick: ask the launcher for a sign of life. False where it gave none for too long,
        and was killed."""
        if not self._settings.hang_s or not self._silence.lasts():
            return True
        if self._silence.is_too_long:
            said = f"the launcher does not answer for {self._settings.hang_s:g} s; killed"
            print(f"hostd: {said}", file=sys.stderr)
            os.kill(self._launcher_pid, signal.SIGKILL)  # not waited for yet: no other has its pid
            return False
        # It does not even read, or has just died: the one counts on, the other its pidfd tells.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.sock.send(PING, socket.MSG_DONTWAIT)
        return True

    @property
    def asks_in_s(self) -> float:
        return self._silence.left_s if self._settings.hang_s else math.inf

    def _obey(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        self._silence.broken()
        if message.get("verb") == "fuse-fd":
            self._send_fuse_fd(message["id"])
        elif message.get("verb") == "layer" and self._settings.writable_layer == "ext4":
            self._send_layer(message)
        elif message.get("verb") == "view-server":
            self._start_view_server(message["id"], message["directory"])
        elif message.get("verb") == "mount":
            self._openers.open(self.sock, message, self._launcher_pid)
        elif message.get("verb") == "image" and self._settings.image_backend == "kernel":
            self._images.mount(self.sock, message, fds[0], self._launcher_pid)
        elif message.get("verb") == "network":
            self._send(message["id"], self._start_network)
        elif message.get("verb") == "netns":
            self._send(message["id"], lambda: (self._network.netns(message["pid"], *fds),))

    def _start_view_server(self, number: int, directory: str) -> None:
        """Answers with its socket and pidfd. One that was there before is ended first."""
        try:
            self._end_view_server()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                user, mnt = self._namespace("user"), self._namespace("mnt")
                try:
                    orders = self._orders()
                    argv = [sys.executable, "-m", "sandboxd.views", directory]
                    argv += [str(orders["node_id"]), str(orders["fuse_id"])]
                    self._view_server = self._spawn(argv, [theirs.fileno(), user, mnt])
                finally:
                    os.close(user)
                    os.close(mnt)
                protocol.send(self.sock, {"id": number}, (ours.fileno(), self._view_server[1]))
        except OSError as error:
            what = f"a view server: {error}"
            known = error.errno or errno.EIO
            protocol.send(self.sock, {"id": number, "errno": known, "what": what})

    def _end_view_server(self) -> None:
        if self._view_server is None:
            return
        pid, pidfd = self._view_server
        self._view_server = None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(pidfd)

    def _start_network(self) -> tuple[int, ...]:
        self._end({ROUTER, RESOLVER}, 0.0)
        return self._network.start(self._launcher_pid, self._start)

    def _send(self, number: int, make: Callable[[], tuple[int, ...]]) -> None:
        """Answer with descriptors, which are closed here."""
        try:
            fds = make()
        except OSError as error:
            answer = {"id": number, "errno": error.errno, "what": error.strerror}
            protocol.send(self.sock, answer)
            return
        try:
            protocol.send(self.sock, {"id": number}, fds)
        finally:
            close_fds(fds)

    def _send_fuse_fd(self, number: int) -> None:
        """A FUSE descriptor belongs to the user namespace it was opened in; only a process inside
        may open it, and only root may open the device (0600). So: a child that joins and opens."""
        user = self._namespace("user")
        pid = os.fork()
        if pid:
            os.close(user)
            os.waitpid(pid, 0)
            return
        try:
            namespaces.setns(user, namespaces.CLONE_NEWUSER)
            fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
            protocol.send(self.sock, {"id": number}, (fd,))
        except OSError as error:
            protocol.send(self.sock, {"id": number, "errno": error.errno})
        finally:
            os._exit(0)

    def _send_layer(self, message: dict[str, Any]) -> None:
        number = message["id"]
        try:
            fd = self._layers.make(message["size_bytes"], message["inodes"])
        except OSError as error:
            what = f"a writable layer: {error}"
            known = error.errno or errno.EIO
            protocol.send(self.sock, {"id": number, "errno": known, "what": what})
            return
        try:
            protocol.send(self.sock, {"id": number}, (fd,))
        finally:
            os.close(fd)

    def stop(self) -> None:
        """End everything and leave nothing. Idempotent."""
        self._undo.close()  # the launcher's order to end
        self._network.stop()
        self._end({name for name, _ in self._pidfds.values()}, STOP_TIMEOUT_S)
        self._end_view_server()
        self._openers.stop()
        self._images.stop()
        if self._cgroups is not None:
            try:
                self._remove_cgroups(self._cgroups)
            except OSError as error:
                print(f"hostd: cgroups left behind: {error}", file=sys.stderr)

    def _end(self, names: set[str], timeout_s: float) -> None:
        """Wait for the end of processes, and kill those that take longer."""
        deadline = time.monotonic() + timeout_s
        for pidfd, (name, pid) in list(self._pidfds.items()):
            if name not in names:
                continue
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            left = max(0.0, deadline - time.monotonic())
            if not poller.poll(left * 1000):
                print(f"hostd: killing the {name}", file=sys.stderr)
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            os.close(pidfd)
            del self._pidfds[pidfd]


def _sealed_copy(program: Path) -> int:
    """A memfd that holds ``program`` and can never be written again; above the fds of ``_spawn``.

    A sandbox's commands begin as clones of PID 1, and are their user's before they exec: what
    /proc/self/exe shows and opens then is to be neither a path nor a file of the host.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        low = os.memfd_create("init", flags | MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        low = os.memfd_create("init", flags)  # before Linux 6.3 each is executable
    with os.fdopen(low, "wb") as file:
        file.write(program.read_bytes())
        file.flush()
        sealed = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 64)
    fcntl.fcntl(
        sealed,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
    )
    # Read-only from here: a file that is open for writing cannot be executed (ETXTBSY).
    try:
        reopened = os.open(f"/proc/self/fd/{sealed}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return fcntl.fcntl(reopened, fcntl.F_DUPFD_CLOEXEC, 64)
        finally:
            os.close(reopened)
    finally:
        os.close(sealed)
