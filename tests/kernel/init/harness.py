"""A zygote and PID 1s without a daemon: this process plays hostd and launcher for them.

For: the tests of this folder, which send each message of ``protocol.h`` and look at what comes
back. Not for: the launcher's own code; of the product only ``host.cgroups``, ``launcher.cgroups``,
``rootfs`` and the protocol's packing are used.

A forked child holds the node's user and mount namespace and makes the mounts in it; images are
plain directories on a tmpfs of its own, so that nothing here needs squashfuse.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandboxd.host.cgroups import NODE, make_node_cgroups, remove_node_cgroups
from sandboxd.host.ids import NODE_ID, SANDBOX_IDS
from sandboxd.host.layers import LoopLayers
from sandboxd.init import protocol as wire
from sandboxd.init.protocol import ExecFlag, Exited, Failure, KillScope, MsgType
from sandboxd.launcher import cgroups as sandbox_cgroups
from sandboxd.launcher import protocol as launcher_protocol
from sandboxd.launcher.__main__ import SANDBOX_CAPABILITIES
from sandboxd.launcher.worker import serve
from sandboxd.linux import capabilities, cgroup, child, mount, namespaces, pidfd, seccomp
from sandboxd.linux.id_ranges import IdRange, map_ids
from sandboxd.model import Limits
from sandboxd.rootfs import skeleton
from sandboxd.rootfs.overlay import make_overlay_of_attached, make_root
from tests.framework import probes, times

IDS = IdRange(2_000_000_000, 65_538)
HOST_NODE_ID = IDS.first + NODE_ID
TIMEOUT_S = times.scaled(30.0)
EXEC_TIMEOUT_S = times.scaled(60.0)
PATH = "PATH=/bin:/usr/bin"

PASSWD = """\
root:x:0:0:root:/root:/bin/sh
agent:x:1000:1000:agent:/home/agent:/bin/sh
far:x:65535:65535::/nowhere:/bin/sh
:x:7:7::/:/bin/sh
broken
toolarge:x:70000:70000::/:/bin/sh
"""
GROUP = "root:x:0:\nagent:x:1000:\naudio:x:29:agent,other\nvideo:x:44:other,agent\nx:x:9:agentx\n"


class Refused(Exception):
    """An R_FAILED."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{wire.step_slug(failure.step)}[{failure.index}]: {failure.err}")
        self.step = wire.step_slug(failure.step)
        self.index = failure.index
        self.errno = failure.err


@dataclass
class Result:
    """How an exec ended, with what its pipes held then."""

    pid: int
    exited: Exited
    out: bytes
    err: bytes

    @property
    def code(self) -> int:
        return os.waitstatus_to_exitcode(self.exited.status)

    @property
    def step(self) -> str:
        return wire.step_slug(self.exited.failure.step)


def build_lower(directory: Path, programs: dict[str, bytes]) -> None:
    """A root with a static busybox, all its applets, and ``programs`` (name in /bin: content)."""
    for name in ("bin", "etc", "proc", "sys", "dev", "root", "home/agent", "usr/bin", "tmp", "dir"):
        (directory / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    for name, content in {"busybox": Path(busybox).read_bytes(), **programs}.items():
        (directory / "bin" / name).write_bytes(content)
        (directory / "bin" / name).chmod(0o755)
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for applet in applets.stdout.split():
        if applet != "busybox":
            (directory / "bin" / applet).symlink_to("busybox")
    (directory / "etc/passwd").write_text(PASSWD)
    (directory / "etc/group").write_text(GROUP)
    (directory / "dir/inner").mkdir()
    (directory / "dir/file").write_text("from the image\n")
    (directory / "tmp").chmod(0o1777)
    os.chown(directory / "home/agent", 1000, 1000)


class Namespaces:
    """The child that holds the node's namespaces, and what it is asked to do there."""

    def __init__(self, scratch: Path, programs: dict[str, bytes]) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(TIMEOUT_S)
        self._ids = itertools.count(1)
        self._undo = contextlib.ExitStack()

        def work() -> None:
            self._sock.close()
            os.umask(0o022)
            mount.mount("images", scratch, "tmpfs", 0, "mode=755,size=64m")
            build_lower(scratch / "base", programs)
            images_fd = os.open(scratch, os.O_PATH | os.O_DIRECTORY)
            serve(theirs, self._handlers(scratch, images_fd))

        flags = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS
        holder = child.running(work, flags, lambda pid: map_ids(pid, IDS, IDS))
        self.pid = self._undo.enter_context(holder).pid
        theirs.close()

    @staticmethod
    def _handlers(scratch: Path, images_fd: int) -> dict[str, Any]:
        def root(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            lowers = request["lowers"]
            if not fds:
                return {}, make_root(images_fd, lowers, request["size_bytes"], request["inodes"])
            # As on a kernel whose overlay takes no detached layer: one made by the host.
            name = f"w{request['id']}"
            (scratch / name).mkdir()
            mount.move_mount(
                fds[0], "", mount.AT_FDCWD, scratch / name, mount.MOVE_MOUNT_F_EMPTY_PATH
            )
            overlay_fd = make_overlay_of_attached(str(scratch), lowers, name)
            return {}, (overlay_fd, os.dup(fds[0]))

        def lower(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            """Entries: name to None (a directory), "-> target" (a symlink), or a file's text."""
            place = scratch / request["name"]
            place.mkdir()
            for name, content in request["entries"].items():
                path = place / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if content is None:
                    path.mkdir()
                elif content.startswith("-> "):
                    path.symlink_to(content[3:])
                else:
                    path.write_text(content)
            return {}, ()

        return {"root": root, "lower": lower}

    def ask_root(self, size_bytes: int, inodes: int, **fields: Any) -> tuple[Any, list[int]]:
        fields |= {"size_bytes": size_bytes, "inodes": inodes}
        if all(probes.missing(name) is None for name in ("overlay-tmpfs", "overlay-detached")):
            return self.ask("root", **fields)
        layer_fd = LoopLayers("/var/tmp", IDS.first).make(size_bytes, inodes)
        try:
            return self.ask("root", (layer_fd,), **fields)
        finally:
            os.close(layer_fd)

    def ask(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> tuple[Any, list[int]]:
        number = next(self._ids)
        launcher_protocol.send(self._sock, {"id": number, "op": op, **fields}, fds)
        answer, fds = launcher_protocol.receive(self._sock)
        assert answer is not None, "the holder of the namespaces died"
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), answer["what"])
        return answer["ok"], fds

    def close(self) -> None:
        self._sock.close()
        self._undo.close()


class Client:
    """One control socket; blocking, with a deadline on everything."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_S)
        self.sock = sock
        self._ids = itertools.count(1)
        self._early: dict[int, list[tuple[wire.Message, list[int]]]] = {}

    def send(
        self,
        kind: int,
        payload: bytes = b"",
        fds: Sequence[int] = (),
        flags: int = 0,
        request_id: int | None = None,
    ) -> int:
        number = next(self._ids) if request_id is None else request_id
        wire.send(self.sock, wire.pack(kind, number, payload, flags), fds)
        return number

    def receive(self) -> tuple[wire.Message, list[int]]:
        datagram, fds = wire.receive(self.sock)
        if not datagram:
            raise ConnectionResetError("PID 1 closed the socket")
        return wire.unpack(datagram), fds

    def answer(self, number: int) -> tuple[wire.Message, list[int]]:
        """The next message with this id; others are kept for who asks for them."""
        while not self._early.get(number):
            message, fds = self.receive()
            self._early.setdefault(message.id, []).append((message, fds))
        return self._early[number].pop(0)

    def expect(self, number: int, kind: MsgType) -> tuple[wire.Message, list[int]]:
        message, fds = self.answer(number)
        if message.type == MsgType.R_FAILED:
            raise Refused(wire.unpack_failure(message.payload))
        assert message.type == kind, f"{message.type} and not {kind!r}"
        return message, fds

    def call(self, kind: MsgType, payload: bytes = b"", fds: Sequence[int] = ()) -> None:
        _, extra = self.expect(self.send(kind, payload, fds), MsgType.R_DONE)
        assert not extra

    def exec(
        self,
        argv: Sequence[str] | str,
        *,
        user: str = "0",
        cwd: str = "/",
        env: Sequence[str] = (PATH,),
        flags: int = 0,
        nofile: int = 1024,
        umask: int = 0o022,
    ) -> int:
        """Send an M_EXEC; a string is a script."""
        if isinstance(argv, str):
            argv, flags = [argv], flags | ExecFlag.EXEC_SHELL
        payload = wire.exec_payload(
            user=user,
            cwd=cwd,
            argv=argv,
            env=wire.cstrings(env),
            env_count=len(env),
            nofile=nofile,
            umask=umask,
        )
        if len(payload) <= wire.MSG_MAX - wire.MSG.size:
            return self.send(MsgType.M_EXEC, payload, flags=flags)
        memfd = os.memfd_create("payload")
        try:
            assert os.write(memfd, payload) == len(payload)
            flags |= ExecFlag.EXEC_PAYLOAD_FD
            return self.send(MsgType.M_EXEC, fds=[memfd], flags=flags)
        finally:
            os.close(memfd)

    def started(self, number: int) -> tuple[int, list[int]]:
        message, fds = self.expect(number, MsgType.R_STARTED)
        return wire.unpack_started(message.payload)[0], fds

    def exited(self, number: int) -> Exited:
        message, fds = self.expect(number, MsgType.R_EXIT)
        assert not fds
        return wire.unpack_exited(message.payload)

    def run(self, argv: Sequence[str] | str, stdin: bytes | None = None, **request: Any) -> Result:
        """The whole life of an exec. What it leaves running may hold its pipes: see ``drain``."""
        if stdin is not None:
            request["flags"] = request.get("flags", 0) | ExecFlag.EXEC_STDIN
        number = self.exec(argv, **request)
        message, fds = self.answer(number)
        pid = 0
        if message.type == MsgType.R_FAILED:
            raise Refused(wire.unpack_failure(message.payload))
        if message.type == MsgType.R_STARTED:
            pid, _ = wire.unpack_started(message.payload)
            if stdin is not None:
                os.write(fds[-1], stdin)
                os.close(fds.pop())
            with Reader(fds) as reader:
                exited = self.exited(number)
                outputs = reader.drain()
            return Result(pid, exited, *[*outputs, b""][:2])
        assert message.type == MsgType.R_EXIT
        return Result(0, wire.unpack_exited(message.payload), b"", b"")

    def sh(self, script: str, **request: Any) -> str:
        """Standard output of a script that must succeed."""
        result = self.run(script, **request)
        assert (result.step, result.code) == ("none", 0), (result, result.err)
        return result.out.decode()

    def kill(self, number: int, sig: int, scope: KillScope = KillScope.KILL_TREE) -> None:
        self.send(MsgType.M_KILL, wire.kill_payload(sig, scope), request_id=number)

    def kill_tree(self, number: int) -> Exited | None:
        """SIGKILL to all of it; returns after R_GONE, with R_EXIT if that had not come before."""
        self.kill(number, signal.SIGKILL)
        exited = None
        while True:
            message, fds = self.answer(number)
            wire.close_fds(fds)
            if message.type == MsgType.R_EXIT:
                exited = wire.unpack_exited(message.payload)
            elif message.type == MsgType.R_GONE:
                return exited

    def file(
        self,
        op: wire.FileOp,
        path: str,
        data: bytes | None = None,
        *,
        user: str = "0",
        flags: int = 0,
        mode: int = 0,
        offset: int = 0,
        length: int | None = None,
    ) -> tuple[Exited, bytes]:
        """One file operation with a pipe of ours; returns its end and what was read."""
        if length is None:
            length = len(data) if data is not None else 1 << 40
        payload = wire.file_payload(
            op, user=user, path=path, flags=flags, mode=mode, offset=offset, length=length
        )
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        writing = op == wire.FileOp.FILE_WRITE
        ours, theirs = (write_fd, read_fd) if writing else (read_fd, write_fd)
        try:
            number = self.send(MsgType.M_FILE, payload, [theirs])
        finally:
            os.close(theirs)
        found = b""
        with os.fdopen(ours, "wb" if writing else "rb", buffering=0) as pipe:
            if writing:
                with contextlib.suppress(BrokenPipeError):
                    pipe.write(data or b"")
            else:
                found = pipe.read()
        return self.exited(number), found

    def close(self) -> None:
        for messages in self._early.values():
            for _, fds in messages:
                wire.close_fds(fds)
        self._early.clear()
        self.sock.close()


class Reader:
    """Empties pipes while a command runs, so that it never waits for us."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)
        self._data = {fd: bytearray() for fd in fds}
        for fd in fds:
            os.set_blocking(fd, False)

    def drain(self) -> list[bytes]:
        """What is there now, without waiting for the end of any."""
        for fd, data in self._data.items():
            with contextlib.suppress(BlockingIOError):
                while block := os.read(fd, 1 << 16):
                    data += block
        return [bytes(data) for data in self._data.values()]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        wire.close_fds(self._fds)


@dataclass
class Sandbox:
    """One PID 1 with its cgroups; ``launcher`` is its first control socket."""

    node: Node
    cgroups: sandbox_cgroups.SandboxCgroups
    launcher: Client
    pid: int
    pidfd: int
    root_fds: list[int] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def set_up(self, **changes: Any) -> None:
        """M_SETUP as the launcher sends it, but for ``changes``."""
        fds = self.cgroups.open_for_pid1()
        try:
            asked = self.launcher.send(MsgType.M_SETUP, setup_payload(len(fds) - 1, **changes), fds)
            _, (namespace,) = self.launcher.expect(asked, MsgType.R_DONE)
            try:
                assert os.readlink(f"/proc/self/fd/{namespace}") == os.readlink(
                    f"/proc/{self.pid}/ns/mnt"
                )
            finally:
                os.close(namespace)
        finally:
            wire.close_fds(fds)

    def take_root(
        self, *lowers: str, size_mb: int = 64, inodes: int = 20_000, payload: bytes = b""
    ) -> None:
        """Make a root over ``lowers``, lowest first, and hand it over."""
        _, fds = self.node.namespaces.ask_root(size_mb << 20, inodes, lowers=lowers[::-1])
        self.root_fds += fds
        self.launcher.call(MsgType.M_ROOT, payload, [fds[0]])

    def attach(self) -> Client:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.enter_context(ours)
            self.launcher.call(MsgType.M_ATTACH, fds=[theirs.fileno()])
            undo.pop_all()
        self.clients.append(Client(ours))
        return self.clients[-1]

    def exec_cgroups(self) -> list[str]:
        return sorted(path.name for path in self.cgroups.v2.iterdir() if path.is_dir())

    def wait_death(self) -> None:
        assert select.select([self.pidfd], [], [], TIMEOUT_S)[0], "PID 1 does not die"

    def wait_exec_cgroups(self, wanted: int) -> None:
        """Until that many execs have a cgroup; their removal is no event for anybody outside."""
        wait_until(lambda: len(self.exec_cgroups()) == wanted)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            pidfd.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.wait_death()
        for client in (self.launcher, *self.clients):
            client.close()
        wire.close_fds([self.pidfd, *self.root_fds])
        self.cgroups.remove(time.monotonic() + TIMEOUT_S)


class Node:
    """A running zygote, and what sandboxes are made of."""

    def __init__(
        self, binary: Path, programs: dict[str, bytes], environment: dict[str, str]
    ) -> None:
        self._undo = contextlib.ExitStack()
        self._names = itertools.count(1)
        with contextlib.ExitStack() as undo:
            scratch = Path(tempfile.mkdtemp(prefix="sandboxd-test-init-"))
            undo.callback(shutil.rmtree, scratch)
            scratch.chmod(0o755)
            groups = make_node_cgroups(f"sandboxd-test-init-{os.getpid()}", HOST_NODE_ID)
            undo.callback(remove_node_cgroups, groups)
            self.groups = groups
            self.namespaces = Namespaces(scratch, programs)
            undo.callback(self.namespaces.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.zygote = Client(ours)
            self.pid = self._spawn(binary, theirs, environment)
            undo.callback(self._stop_zygote)
            self.token = seccomp.SyscallToken.draw()
            number = self.zygote.send(MsgType.Z_INIT, self._init_payload())
            message, _ = self.zygote.expect(number, MsgType.Z_READY)
            assert message.payload == b""
            self._undo = undo.pop_all()

    def _init_payload(self) -> bytes:
        return wire.zygote_init_payload(
            unmapped_id=NODE_ID,
            map_count=SANDBOX_IDS,
            program=seccomp.compile_profile(seccomp.SANDBOX_PROFILE, exempt=self.token),
            token=(self.token.low, self.token.high),
            caps=capabilities.mask(SANDBOX_CAPABILITIES),
        )

    def _spawn(self, binary: Path, sock: socket.socket, environment: dict[str, str]) -> int:
        fds = [
            sock.fileno(),
            namespaces.open_namespace(self.namespaces.pid, "user"),
            namespaces.open_namespace(self.namespaces.pid, "mnt"),
        ]
        # Above the targets first: a target number may be one of the sources.
        high = [os.dup(fd) for fd in fds]
        while min(high) < 3 + len(fds):
            high = [*high, os.dup(high[0])][1:]
        actions: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, fd, 3 + i) for i, fd in enumerate(high)]
        try:
            pid = os.posix_spawn(str(binary), ["init", "zygote"], environment, file_actions=actions)
        finally:
            wire.close_fds([*fds[1:], *range(min(high), max(high) + 1)])
            sock.close()
        cgroup.add_process(self.groups.v2 / NODE, pid)
        return pid

    def _stop_zygote(self) -> None:
        self.zygote.close()
        os.waitpid(self.pid, 0)

    def clone(self) -> Sandbox:
        """A PID 1 that has not been told anything yet."""
        groups = sandbox_cgroups.make(self.groups, f"s{next(self._names)}")
        groups.limit(Limits(memory_mb=256, disk_mb=64, pids=1500))
        # The launcher makes them under the node's id and so owns them.
        for path in (groups.v2, *groups.v1.values()):
            entry = "cgroup.procs" if path == groups.v2 else "tasks"
            for target in (path, path / entry):
                os.chown(target, HOST_NODE_ID, HOST_NODE_ID)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        directory = cgroup.open_directory(groups.v2)
        with theirs:
            number = self.zygote.send(MsgType.Z_CLONE, fds=[theirs.fileno(), directory])
            os.close(directory)
            message, fds = self.zygote.expect(number, MsgType.Z_CLONED)
        pid, err = wire.unpack_cloned(message.payload)
        if err:
            ours.close()
            groups.remove(time.monotonic() + TIMEOUT_S)
            raise OSError(err, os.strerror(err), "clone")
        assert len(fds) == 1
        return Sandbox(self, groups, Client(ours), pid, fds[0])

    @contextlib.contextmanager
    def cloned(self) -> Iterator[Sandbox]:
        sandbox = self.clone()
        try:
            yield sandbox
        finally:
            sandbox.close()

    @contextlib.contextmanager
    def sandbox(self, *lowers: str, **root: Any) -> Iterator[Sandbox]:
        with self.cloned() as sandbox:
            sandbox.set_up()
            sandbox.take_root(*(lowers or ("base",)), **root)
            yield sandbox

    def close(self) -> None:
        self._undo.close()


def setup_payload(cgroup_v1_count: int, **changes: Any) -> bytes:
    given: dict[str, Any] = {
        "hostname": "box",
        "sysctls": skeleton.SYSCTLS,
        "masks": skeleton.masked_paths(os.cpu_count() or 1),
        "readonly": skeleton.READONLY,
        "cgroup_v1_count": cgroup_v1_count,
        "shm_mb": 16,
        "shm_inodes": 100,
        "dev_inodes": 256,
        "pty_max": 8,
        "pending_signals": 100,
        "memlock_kb": 64,
        "msgqueue_kb": 200,
    }
    return wire.setup_payload(**(given | changes))


def wait_until(condition: Any, timeout_s: float = TIMEOUT_S) -> None:
    """For states of the kernel that announce themselves to nobody here."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def cpu_time_s(pid: int) -> float:
    """CPU time used so far, by the scheduler's own count (proc_pid_schedstat: nanoseconds)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
