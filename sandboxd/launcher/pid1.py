"""The launcher's ends of the sockets to the zygote and to each sandbox's PID 1 (init/protocol.h).

What comes back from PID 1 is untrusted: lengths are checked, descriptors that were not asked for
are closed, and an answer to nothing is ignored.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from sandboxd.errors import SandboxSetupError
from sandboxd.guard import Silence
from sandboxd.init import protocol as wire
from sandboxd.init.protocol import ExecFlag, KillScope, MsgType
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.linux import pidfd
from sandboxd.model import KernelCaps
from sandboxd.rootfs import skeleton

STEP_TIMEOUT_S: Final = 20.0
"""For one answer of PID 1 or the zygote: the kernel's work, long only when the node is overrun."""

_ZYGOTE_STEPS: Final = ("", "join the namespaces", "become the node's id", "build its root")

Answer = tuple[wire.Message, list[int]]
Listener = Callable[[wire.Message | None, list[int]], None]
"""Takes each answer to one request, with its descriptors; None once the other end is gone."""


class Channel:
    """One SEQPACKET socket: requests by id, each settled by the answer with that id."""

    def __init__(self, loop: Loop, sock: socket.socket, name: str) -> None:
        self._loop = loop
        self._name = name
        self._sock: socket.socket | None = sock
        self._ids = itertools.count(1)
        self._pending: dict[int, Promise[Answer]] = {}
        self._listeners: dict[int, Listener] = {}
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._readable)

    def send(
        self, kind: MsgType, payload: bytes = b"", fds: Sequence[int] = (), flags: int = 0
    ) -> Promise[Answer]:
        """Send a message; the promise is its answer and the descriptors that came with it."""
        promise: Promise[Answer] = Promise(lambda answer: wire.close_fds(answer[1]))
        if self._sock is None:
            promise.reject(BrokenPipeError(32, f"{self._name} is gone"))
            return promise
        number = next(self._ids)
        self._pending[number] = promise
        try:
            wire.send(self._sock, wire.pack(kind, number, payload, flags), fds)
        except OSError as error:
            self._pending.pop(number, None)
            promise.reject(error)
        return promise

    def listen(
        self,
        kind: MsgType,
        payload: bytes,
        fds: Sequence[int],
        listener: Listener,
        *,
        flags: int = 0,
    ) -> int:
        """Send a request that is answered more than once; returns its id, for ``tell`` and
        ``forget``. Raises OSError as sendmsg(2) does."""
        if self._sock is None:
            raise BrokenPipeError(32, f"{self._name} is gone")
        number = next(self._ids)
        wire.send(self._sock, wire.pack(kind, number, payload, flags), fds)
        self._listeners[number] = listener
        return number

    def tell(self, kind: MsgType, number: int, payload: bytes) -> None:
        """Send a message about an earlier request. Raises OSError as sendmsg(2) does."""
        if self._sock is None:
            raise BrokenPipeError(32, f"{self._name} is gone")
        wire.send(self._sock, wire.pack(kind, number, payload), ())

    def forget(self, number: int) -> None:
        self._listeners.pop(number, None)

    def close(self) -> None:
        """Close our end. To PID 1 that is the order to exit."""
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
        pending, self._pending = self._pending, {}
        for promise in pending.values():
            promise.reject(BrokenPipeError(32, f"{self._name} is gone"))
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(None, [])

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            datagram, fds = wire.receive(self._sock)
            message = wire.unpack(datagram)
        except BlockingIOError:
            return
        except (OSError, wire.ProtocolError):  # an empty datagram, the end, is one as well
            self.close()
            return
        listener = self._listeners.get(message.id)
        if listener is not None:
            listener(message, fds)
            return
        promise = self._pending.pop(message.id, None)
        if promise is None or promise.settled:
            wire.close_fds(fds)
            return
        promise.resolve((message, fds))


class Zygote:
    """The process that clones sandboxes, seen from the launcher."""

    def __init__(self, loop: Loop, sock: socket.socket, pidfd: int) -> None:
        self._loop = loop
        self._channel = Channel(loop, sock, "the zygote")
        self._pidfd = pidfd

    def initialise(
        self,
        *,
        unmapped_id: int,
        map_count: int,
        map_last: int,
        no_cgroups: bool,
        token: tuple[int, int],
        caps: int,
        program: bytes,
    ) -> Task[None]:
        """Send what every PID 1 inherits. Raises SandboxSetupError naming the zygote's step."""
        payload = wire.zygote_init_payload(
            unmapped_id=unmapped_id,
            map_count=map_count,
            map_last=map_last,
            no_cgroups=no_cgroups,
            program=program,
            token=token,
            caps=caps,
        )
        answer, fds = yield from self._loop.wait(
            self._channel.send(MsgType.Z_INIT, payload), STEP_TIMEOUT_S, "the zygote's start"
        )
        wire.close_fds(fds)
        if answer.type != MsgType.Z_READY:
            failure = wire.unpack_failure(answer.payload)
            step = _ZYGOTE_STEPS[failure.index]
            raise SandboxSetupError(
                f"the zygote could not {step}: {os.strerror(failure.err)}",
                step=step,
                errno=wire.errno_symbol(failure.err),
            )

    def clone(self, control: socket.socket, cgroup_fd: int | None) -> Task[tuple[int, int]]:
        """A new PID 1 with ``control`` as its socket: its pid and a pidfd."""
        given = [control.fileno(), *(() if cgroup_fd is None else (cgroup_fd,))]
        answer, fds = yield from self._loop.wait(
            self._channel.send(MsgType.Z_CLONE, fds=given),
            STEP_TIMEOUT_S,
            "the zygote",
        )
        pid, number = wire.unpack_cloned(answer.payload)
        if number or len(fds) != 1:
            wire.close_fds(fds)
            raise SandboxSetupError(
                f"clone3 of a sandbox: {os.strerror(number)}",
                step="clone",
                errno=wire.errno_symbol(number),
            )
        return pid, fds[0]

    @property
    def dead(self) -> bool:
        """Whether the zygote has died. Every PID 1 dies with it (PR_SET_PDEATHSIG). By the socket
        it could not be told: a PID 1 that is just being made has a copy of the zygote's end."""
        return self.dies_within(0)

    def dies_within(self, seconds: float) -> bool:
        """The same; blocks. A PID 1 on another CPU may be seen to end a moment before the zygote
        with which it dies: measured on Linux 6.18, microseconds."""
        return pidfd.wait_ended(self._pidfd, seconds)

    def watch(self, limit_s: float) -> Task[None]:
        """For ever: see whether it answers, and kill it where it does not for so long. hostd sees
        its end, and starts the node anew."""
        silence = Silence(limit_s)
        # A clone of nothing is refused at once.
        answer = self._channel.send(MsgType.Z_CLONE)
        while not self.dead:
            yield from self._loop.sleep(silence.tick_s)
            if answer.settled:
                if answer.error is None:  # else its socket was full
                    silence.broken()
                answer = self._channel.send(MsgType.Z_CLONE)
            if silence.lasts() and silence.is_too_long:
                print(
                    f"launcher: the zygote does not answer for {limit_s:g} s; killed",
                    file=sys.stderr,
                )
                with suppress(ProcessLookupError):
                    pidfd.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                return

    def close(self) -> None:
        self._channel.close()


class Pid1:
    """One sandbox's PID 1, seen from the launcher."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self._loop = loop
        self._channel = Channel(loop, sock, "PID 1")

    def set_up(
        self,
        hostname: str,
        shm_mb: int,
        cgroup_fds: Sequence[int],
        masked: Sequence[str],
        caps: KernelCaps,
        *,
        last_id: int,
    ) -> Promise[Answer]:
        """Send M_SETUP; settle it with ``check``."""
        payload = wire.setup_payload(
            hostname=hostname,
            sysctls=(
                *skeleton.SYSCTLS,
                *skeleton.cap_sysctls(caps),
                *skeleton.ping_sysctls(last_id),
                *skeleton.shm_sysctls(shm_mb),
            ),
            masks=masked,
            readonly=skeleton.READONLY,
            cgroup_v1_count=max(0, len(cgroup_fds) - 1),
            shm_mb=shm_mb,
            shm_inodes=skeleton.SHM_INODES,
            dev_inodes=skeleton.DEV_INODES,
            pty_max=caps.ptys,
            pending_signals=caps.pending_signals,
            memlock_kb=caps.locked_memory_kb,
            msgqueue_kb=caps.posix_queue_kb,
        )
        return self._channel.send(MsgType.M_SETUP, payload, cgroup_fds)

    def take_root(
        self,
        overlay_fd: int,
        hostname: str | None = None,
        flags: int = 0,
        mounts: Sequence[tuple[int, str]] = (),
    ) -> Promise[Answer]:
        """Send M_ROOT; ``hostname`` where it is not the one of ``set_up``, ``mounts`` (each with
        its target, relative to the root) once at most: they go with it from root to root."""
        payload = b""
        if hostname is not None or mounts:
            payload = wire.cstrings([hostname or "", *(target for _, target in mounts)])
        fds = [overlay_fd, *(fd for fd, _ in mounts)]
        return self._channel.send(MsgType.M_ROOT, payload, fds=fds, flags=flags)

    def take_filter(self, program: bytes) -> Promise[Answer]:
        """Send M_FILTER, once at most."""
        return self._channel.send(MsgType.M_FILTER, program)

    def bind_views(self, mount_fds: Sequence[int]) -> Promise[Answer]:
        """Send M_VIEWS with a mount for each of ``skeleton.VIEWS``."""
        payload = wire.cstrings([path for _, path in skeleton.VIEWS])
        return self._channel.send(MsgType.M_VIEWS, payload, mount_fds)

    def attach(self, sock: socket.socket) -> Promise[Answer]:
        return self._channel.send(MsgType.M_ATTACH, fds=[sock.fileno()])

    def ping(self) -> Promise[Answer]:
        """Answered once PID 1 has dealt with all that was sent to it before."""
        return self._channel.send(MsgType.M_PING)

    def start(self, flags: int, payload_fd: int, listener: Listener) -> int:
        """Send M_EXEC with the payload that a daemon made; returns the exec's id."""
        return self._channel.listen(
            MsgType.M_EXEC, b"", [payload_fd], listener, flags=flags | ExecFlag.EXEC_PAYLOAD_FD
        )

    def signal(self, number: int, signal: int, scope: KillScope) -> None:
        """Signal an exec. SIGKILL to the tree is answered by R_GONE, known or not."""
        self._channel.tell(MsgType.M_KILL, number, wire.kill_payload(signal, scope))

    def forget(self, number: int) -> None:
        self._channel.forget(number)

    def check(self, promise: Promise[Answer], what: str) -> Task[None]:
        """Wait for R_DONE. Raises SandboxSetupError naming the step, TimeoutError, OSError."""
        wire.close_fds((yield from self.check_fds(promise, what)))

    def check_fds(self, promise: Promise[Answer], what: str) -> Task[list[int]]:
        """The same, with the descriptors that came with it."""
        answer, fds = yield from self._loop.wait(promise, STEP_TIMEOUT_S, what)
        if answer.type == MsgType.R_DONE:
            return fds
        wire.close_fds(fds)
        failure = wire.unpack_failure(answer.payload)
        name = wire.step_slug(failure.step)
        raise SandboxSetupError(
            f"{what} failed at {name}[{failure.index}]: {os.strerror(failure.err)}",
            step=name,
            index=failure.index,
            errno=wire.errno_symbol(failure.err),
        )

    def close(self) -> None:
        self._channel.close()
