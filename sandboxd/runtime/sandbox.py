"""One sandbox as the daemon knows it: its record, its way to PID 1, and how it is shown.

What must outlive the daemon is in ``meta``, which the launcher keeps; the rest can be lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sandboxd.errors import (
    ExecIdTaken,
    NodeUnavailable,
    SandboxBusy,
    SandboxdError,
    SandboxExclusive,
    SandboxLost,
    SandboxNotFound,
    SandboxPaused,
)
from sandboxd.images.mounts import Share
from sandboxd.init import protocol
from sandboxd.init.protocol import ExecFlag
from sandboxd.model import (
    ExecRequest,
    ExecResult,
    ImageConfig,
    Limits,
    SandboxSpec,
    SandboxState,
)
from sandboxd.runtime.control import Control
from sandboxd.runtime.events import EventLog
from sandboxd.runtime.exec import Exec, Sink
from sandboxd.runtime.image_watch import ImageWatch
from sandboxd.runtime.meters import Meters
from sandboxd.runtime.node_events import NodeEvents
from sandboxd.runtime.oom import OomCounter
from sandboxd.runtime.pipes import Leftovers
from sandboxd.runtime.port_connection import PortConnections

log = logging.getLogger(__name__)

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_TERM: Final = "xterm-256color"
META_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SandboxView:
    """A sandbox at one moment, as the API shows it."""

    id: str
    state: SandboxState
    spec: SandboxSpec
    image_key: str
    user: str
    workdir: str
    created_at: float
    expires_at: float
    phases_ms: dict[str, float]
    failure: SandboxdError | None

    @property
    def limits(self) -> Limits:
        return self.spec.limits


@dataclass(frozen=True, slots=True)
class PackedCommand:
    """A command as M_EXEC takes it, and whom and where it is for."""

    payload: bytes
    flags: int
    user: str
    cwd: str


@dataclass(frozen=True, slots=True)
class IdempotencyMark:
    """Under which key a sandbox was asked for, and what was asked."""

    key: str
    fingerprint: str


@dataclass(eq=False, slots=True)
class Sandbox:
    """A row of the table. Made by the manager, in the event loop's thread like all else here."""

    id: str
    spec: SandboxSpec
    created_at: float
    """Seconds since the epoch, as are all times that are shown."""
    mark: IdempotencyMark | None = None
    state: SandboxState = SandboxState.CREATING
    image_key: str = ""
    image_config: ImageConfig = field(default_factory=ImageConfig)
    phases_ms: dict[str, float] = field(default_factory=dict)
    mount: Share | None = None
    failure: SandboxdError | None = None
    made: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once creating has ended, well or not."""
    deletion: asyncio.Task[None] | None = None
    renewed_until: float | None = None
    """When its time is up, where that was set anew since it was made."""
    finished: bool = True
    """Whether all it was asked for with is done; else no later daemon takes it over."""
    resetting: bool = False
    program: bytes = b""
    """That of ``spec.seccomp``, for the launcher, which keeps it."""
    alone: bool = False
    """An exclusive command has it to itself (``exclusive.py``)."""
    kill_from_outside: Callable[[int], None] = lambda _cgroup: None
    """Have the launcher kill an exec, by the number of its cgroup."""
    check_images: Callable[[Callable[[bool], None]], None] = lambda told: told(True)
    """Find out whether the servers of its images answer, and tell."""
    last_used_at: float = field(default_factory=time.monotonic)
    events: EventLog = field(default_factory=EventLog)
    execs: dict[str, Exec] = field(default_factory=dict)
    """The commands that run and have an id to be killed by."""
    background: int = 0
    """Processes that run in the background, as far as this daemon knows."""
    ports: PortConnections = field(default_factory=PortConnections)
    on_failure: Callable[[SandboxdError], None] = lambda _error: None
    """Told once it has failed: what the launcher started for it is not told by its control."""
    meters: Meters | None = None
    _control: Control | None = None
    _oom: OomCounter | None = None
    _oom_kills: int | None = None
    """As many as ``meters`` were told of."""
    _images: ImageWatch | None = None
    _leftovers: Leftovers | None = None
    _env: dict[str, str] = field(default_factory=dict)
    _env_packed: tuple[bytes, int] = (b"", 0)

    # --- its record --------------------------------------------------------------------------

    @property
    def expires_at(self) -> float:
        return self.renewed_until or self.created_at + self.spec.ttl_s

    def due_in_s(self) -> tuple[float, str]:
        """Seconds until it is deleted by itself as things stand, and why that will be."""
        left_s, why = self.expires_at - now(), "its time is up"
        idle_s = self.spec.idle_timeout_s
        if idle_s is not None:
            busy = self.background > 0 or (self._control is not None and self._control.waiting > 0)
            idle_left_s = idle_s - (0.0 if busy else time.monotonic() - self.last_used_at)
            if idle_left_s < left_s:
                left_s, why = idle_left_s, f"it was idle for {idle_s:g} s"
        return left_s, why

    def touch(self) -> None:
        """It is being used: its idle time begins anew."""
        self.last_used_at = time.monotonic()

    @property
    def user(self) -> str:
        return self.spec.user or self.image_config.user

    @property
    def workdir(self) -> str:
        return self.spec.workdir or self.image_config.workdir

    def set_image(self, key: str, config: ImageConfig) -> None:
        self.image_key = key
        self.image_config = config
        self._env = {
            "PATH": DEFAULT_PATH,
            "HOSTNAME": self.spec.hostname,
            **dict(entry.split("=", 1) for entry in config.env),
            **self.spec.env,
        }
        self._env_packed = _pack_env(self._env)

    def meta(self) -> dict[str, Any]:
        """What the launcher keeps for a daemon that starts anew."""
        return {
            "version": META_VERSION,
            "spec": self.spec.to_json(),
            "image_key": self.image_key,
            "image_config": {
                "env": list(self.image_config.env),
                "workdir": self.image_config.workdir,
                "user": self.image_config.user,
            },
            "created_at": self.created_at,
            "idempotency": [self.mark.key, self.mark.fingerprint] if self.mark else None,
            "renewed_until": self.renewed_until,
            "paused": self.state is SandboxState.PAUSED,
            "finished": self.finished,
        }

    @classmethod
    def from_meta(cls, sandbox_id: str, meta: dict[str, Any]) -> Sandbox:
        """The record that was put into ``meta``. Raises ValueError, KeyError or TypeError where it
        was not this version that put it there."""
        if meta["version"] != META_VERSION:
            raise ValueError(f"meta of version {meta['version']!r}")
        mark = meta["idempotency"]
        sandbox = cls(
            id=sandbox_id,
            spec=SandboxSpec.from_json(meta["spec"]),
            created_at=float(meta["created_at"]),
            mark=IdempotencyMark(*mark) if mark else None,
            renewed_until=meta["renewed_until"],
            finished=bool(meta.get("finished", True)),
            # What ``connect`` makes of it where it was not paused.
            state=SandboxState.PAUSED if meta["paused"] else SandboxState.CREATING,
        )
        config = meta["image_config"]
        sandbox.set_image(
            str(meta["image_key"]),
            ImageConfig(env=tuple(config["env"]), workdir=config["workdir"], user=config["user"]),
        )
        sandbox.made.set()
        return sandbox

    def view(self) -> SandboxView:
        return SandboxView(
            id=self.id,
            state=self.state,
            spec=self.spec,
            image_key=self.image_key,
            user=self.user,
            workdir=self.workdir,
            created_at=self.created_at,
            expires_at=self.expires_at,
            phases_ms=dict(self.phases_ms),
            failure=self.failure,
        )

    # --- its life ----------------------------------------------------------------------------

    @property
    def about(self) -> dict[str, str]:
        """For the log."""
        return {"sandbox": self.id, "run": self.spec.run} if self.spec.run else {"sandbox": self.id}

    def observe(self, meters: Meters, node_events: NodeEvents) -> None:
        """Have the node's eyes see what becomes of it. They hold its names, not the sandbox."""
        self.meters = meters
        self.events.told = partial(node_events.add, self.id, self.spec.run)

    def count_oom_kills(self) -> None:
        """Tell ``meters`` of those since it was last called."""
        if self._oom is not None and self.meters is not None:
            kills = self._oom.read()
            if self._oom_kills is not None:
                self.meters.oom_kills += max(0, kills - self._oom_kills)
            self._oom_kills = kills

    def connect(
        self,
        fds: Sequence[int],
        oom_kill_path: str,
        on_closed: Callable[[Sandbox, str], None],
        oom_fd: int = -1,
    ) -> None:
        """Take the control socket and the pipes of the images' servers (the fds are owned from here
        on): the sandbox can be used."""
        self.resetting = False
        control_fd, *watched = fds
        self._images = ImageWatch(watched)
        self._control = Control(
            socket.socket(fileno=control_fd),
            lambda reason: on_closed(self, reason),
            self._images.all_alive,
        )
        self._oom = OomCounter(oom_kill_path, oom_fd)
        if self._oom_kills is None:
            self.count_oom_kills()  # those of before are an earlier daemon's to count
        self._leftovers = Leftovers()
        if self.state is SandboxState.CREATING:
            self.state = SandboxState.RUNNING

    @property
    def is_sound(self) -> bool:
        """Whether a result can be believed: the servers of its images live."""
        return self._images is None or self._images.all_alive()

    @property
    def is_cut_off(self) -> bool:
        """Whether its PID 1 went away and nobody knows why yet."""
        return (
            self.failure is None
            and self.state is not SandboxState.DELETING
            and self._control is not None
            and not self._control.is_open
        )

    def fail(self, error: SandboxdError) -> None:
        """Its PID 1 or its image is gone. Everything under way in it ends with ``error``."""
        if self.failure is not None or self.state is SandboxState.DELETING:
            return
        told = (self.id, error.code, error.message)
        log.info("sandbox %s failed: %s: %s", *told, extra=self.about)
        self.failure = error
        self.state = SandboxState.FAILED
        self.events.add("failed", error.message, code=error.code, **_reason(error))
        self.ports.end(error)
        if self._control is not None:
            self._control.fail(error)
        self.on_failure(error)

    def disconnect(self, error: SandboxdError) -> None:
        """Let go of every fd; what is under way ends with ``error``. Idempotent."""
        self.ports.end(error)
        if self._control is not None:
            self._control.fail(error)
        if self._leftovers is not None:
            self._leftovers.close()
        if self._oom is not None:
            self.count_oom_kills()
            self._oom.close()
        if self._images is not None:
            self._images.close()

    def begin_reset(self, error: SandboxdError) -> None:
        """All that is under way ends with ``error``; ``connect`` follows, or ``fail``."""
        self.disconnect(error)
        self._control = None
        self.resetting = True

    def control(self, *, alone: bool = False) -> Control:
        """The way to PID 1, for one more request; ``alone`` is for that of an exclusive command.
        Raises the sandbox's failure where there is none."""
        self.last_used_at = time.monotonic()
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self.state is SandboxState.DELETING:
            raise SandboxNotFound(f"sandbox {self.id} is being deleted")
        if self.resetting:
            raise SandboxBusy(f"sandbox {self.id} is being reset")
        if self._control is None:
            raise NodeUnavailable(f"sandbox {self.id} is still being made", retry_after_s=1)
        if self.alone and not alone:
            raise SandboxExclusive(f"an exclusive command has sandbox {self.id} to itself")
        return self._control

    def control_to_start(self, *, alone: bool = False) -> Control:
        """The same, to start a program. Raises SandboxPaused too."""
        if self.state is SandboxState.PAUSED:
            raise SandboxPaused(f"sandbox {self.id} is paused", hint="resume it first")
        return self.control(alone=alone)

    # --- what is done in it ------------------------------------------------------------------

    def start_exec(
        self,
        request: ExecRequest,
        *,
        sinks: tuple[Sink, Sink] | None = None,
        on_started: Callable[[int], None] | None = None,
        exec_id: str | None = None,
        alone: bool = False,
    ) -> Exec:
        """Send a command off. Raises SandboxdError where that fails at once; all else is told by
        ``Exec.done``. ``sinks`` take its output where it is not to be kept for the result;
        ``alone`` is for ``exclusive.py``, which is what starts an exclusive one."""
        control = self.control_to_start(alone=alone)
        if exec_id in self.execs:
            raise ExecIdTaken(f"a command of the id {exec_id!r} runs in this sandbox")
        assert self._oom is not None
        assert self._leftovers is not None
        packed = self.pack_command(request)
        running = Exec(
            control,
            request,
            user=packed.user,
            cwd=packed.cwd,
            oom=self._oom,
            leftovers=self._leftovers,
            on_kill=self.kill_from_outside,
            on_unkillable=self.unkillable,
            check_images=self.check_images,
            sinks=sinks,
            on_started=on_started,
        )
        running.start(packed.payload, packed.flags)
        running.done.add_done_callback(self._exec_ended)
        if exec_id is not None and not running.done.done():
            self.execs[exec_id] = running
            running.done.add_done_callback(lambda _: self.execs.pop(exec_id, None))
        return running

    def pack_command(self, request: ExecRequest) -> PackedCommand:
        """What PID 1 is told of a command."""
        user = request.user or self.user
        flags = 0
        if request.stdin is not None:
            flags |= ExecFlag.EXEC_STDIN
        if request.merge_stderr:
            flags |= ExecFlag.EXEC_MERGE_STDERR
        cwd = request.cwd
        if cwd is None:
            # An image may name a working directory that it does not have.
            cwd = self.workdir
            flags |= ExecFlag.EXEC_CWD_CREATE
        command = request.command
        if isinstance(command, str):
            flags |= ExecFlag.EXEC_SHELL
            if request.login:
                flags |= ExecFlag.EXEC_LOGIN
            command = (command,)
        env, env_count = self._env_packed
        tty_size = 0
        if request.tty is not None:
            flags |= ExecFlag.EXEC_TTY
            tty_size = request.tty.rows << 16 | request.tty.cols
        if request.env or request.tty is not None:
            terminal = {"TERM": DEFAULT_TERM} if request.tty is not None else {}
            env, env_count = _pack_env({**terminal, **self._env, **request.env})
        payload = protocol.exec_payload(
            user=user,
            cwd=cwd,
            argv=command,
            env=env,
            env_count=env_count,
            nofile=self.spec.limits.nofile,
            tty_size=tty_size,
        )
        return PackedCommand(payload, flags, user, cwd)

    def _exec_ended(self, done: asyncio.Future[ExecResult]) -> None:
        self.last_used_at = time.monotonic()
        error = None if done.cancelled() else done.exception()
        if self.meters is not None and not done.cancelled():
            if error is None:
                self.meters.exec_ended(done.result())
            elif isinstance(error, SandboxdError):
                self.meters.exec_failed(error)
        if isinstance(error, SandboxdError):
            self.events.add("exec-failed", error.message, code=error.code, cause=error.cause)
        elif not done.cancelled() and done.result().oom_killed:
            self.events.add("oom", "a command was killed as the sandbox ran out of memory")

    def unkillable(self) -> None:
        """One of its processes has outlived SIGKILL for too long."""
        self.fail(SandboxLost("a process of the sandbox cannot be killed", reason="unkillable"))


def _reason(error: SandboxdError) -> dict[str, Any]:
    return {"reason": error.detail["reason"]} if "reason" in error.detail else {}


def _pack_env(env: dict[str, str]) -> tuple[bytes, int]:
    return protocol.cstrings([f"{name}={value}" for name, value in env.items()]), len(env)


def now() -> float:
    """Wall time: what is shown, and what a restarted daemon can compare with."""
    return time.time()
