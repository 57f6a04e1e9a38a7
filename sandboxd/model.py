"""The words every part shares: what a sandbox is, what an exec asks for and answers.

Plain frozen dataclasses, so that the launcher can use them without pydantic; the HTTP schemas in
``api/schemas.py`` are their public spelling. Sizes are mebibytes where the name ends in ``_mb``,
times are seconds where it ends in ``_s``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar


class SandboxState(StrEnum):
    """Where a sandbox stands. It only ever moves downwards in this list, but for the way back from
    a pause."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    """Its commands are frozen and none can be started; its files can be read and written."""
    FAILED = "failed"
    """Its PID 1 or its image is gone: nothing can run in it; it waits to be deleted."""
    DELETING = "deleting"


class Enforcement(StrEnum):
    """How a limit is held. ``NONE`` is said aloud, never left out."""

    ENFORCED = "enforced"
    WATCHDOG = "watchdog"
    NONE = "none"


class Record:
    """A dataclass with slots, as a dict."""

    __slots__: ClassVar[tuple[str, ...]] = ()

    def as_dict(self) -> dict[str, Any]:
        """Its fields, as they are. ``dataclasses.asdict`` copies deeply, and takes fifty times as
        long: longer than to parse the request that asks for a sandbox."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Limits(Record):
    """What one sandbox may use.

    The memory cgroup holds ``memory_mb + disk_mb`` plus a reserve, because pages of the writable
    tmpfs are charged to it: without that, filling the disk would be an OOM kill and not ENOSPC.
    """

    cpus: float = 1.0
    memory_mb: int = 2048
    disk_mb: int = 2048
    inodes: int = 262_144
    pids: int = 512
    nofile: int = 16_384
    shm_mb: int = 64
    cpu_weight: int = 100
    """Against other sandboxes that want the same CPU, 1 to 10,000."""
    cpuset: str = ""
    """Which CPUs, as a list like ``0-3,8``; all of the node's if empty."""
    io_read_bps: int = 0
    """Bytes a second from the devices of the writable layer; like the next three no limit if 0."""
    io_write_bps: int = 0
    io_read_iops: int = 0
    """Requests a second."""
    io_write_iops: int = 0


IO_LIMITS = {
    "io_read_bps": 1 << 20,
    "io_write_bps": 1 << 20,
    "io_read_iops": 64,
    "io_write_iops": 64,
}
"""Limits that are none at 0, and the least that each can be else: a killed process that waits for
its turn at a disk ends only after it."""

CPU_WEIGHT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class KernelCaps:
    """What one sandbox may hold of what no cgroup counts: the same for all of a node.

    The kernel counts the first two for each user of the sandbox and up through every namespace
    above it, the last three for each user (``user_namespaces(7)``, ``getrlimit(2)``).
    """

    inotify_instances: int = 128
    inotify_watches: int = 65_536
    ptys: int = 64
    posix_queues: int = 64
    """POSIX message queues."""
    posix_queue_kb: int = 800
    """RLIMIT_MSGQUEUE: kernel memory of those; what the kernel gives every user."""
    pending_signals: int = 16_384
    """RLIMIT_SIGPENDING: queued signals and POSIX timers."""
    locked_memory_kb: int = 8192
    """RLIMIT_MEMLOCK; what the kernel gives every user."""


class NetworkMode(StrEnum):
    """How much of a network a sandbox has."""

    NONE = "none"
    """Loopback."""
    ALLOW = "allow"
    """What a list of entries names."""
    FULL = "full"
    """All but the host, other sandboxes and what gives a machine its credentials."""


@dataclass(frozen=True, slots=True)
class NetworkSpec(Record):
    """The network of a sandbox; ``sandboxd.network.policy`` says what an entry is."""

    mode: NetworkMode = NetworkMode.NONE
    allow: tuple[str, ...] = ()
    bandwidth_mbit: int | None = None
    """In each direction; what the node allows if None."""
    run_network: bool = False
    """Whether it sees, and is seen by, the other sandboxes of its run that asked for this."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NetworkSpec:
        mode = NetworkMode(data["mode"])
        return cls(**{**data, "mode": mode, "allow": tuple(data["allow"])})


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What the image says about how its programs run (the OCI config's inner object)."""

    env: tuple[str, ...] = ()
    workdir: str = "/"
    user: str = "0"
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CopyFrom(Record):
    """What a sandbox is made with of another's files. ``paths`` are absolute and normal."""

    sandbox: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SeccompChoice(Record):
    """A profile on top of the one that all sandboxes have. ``name`` is "" for one that came with
    the request; ``digest`` is of its content."""

    name: str
    digest: str


MOUNTS_MAX = 8
"""HOST_MOUNTS_MAX of ``init/protocol.h``."""


@dataclass(frozen=True, slots=True)
class MountSpec(Record):
    """Files of the host in a sandbox. Both paths are absolute and normal."""

    source: str
    target: str
    read_only: bool = True
    ids: str = ""
    """``mapped`` where the sandbox sees the host's ids 0 to 65535 as they are, ``unmapped`` where
    all but those of its own range show as ``nobody``; "" until it is known."""


@dataclass(frozen=True, slots=True)
class MountRoot:
    """A directory of the host below which mounts may be asked for."""

    path: str
    writable: bool = False
    mapped: bool = True
    """Whether read-only mounts show the host's ids, where the file system can."""


def parse_mount_roots(text: str) -> tuple[MountRoot, ...]:
    """``PATH[:rw][:unmapped]``, comma-separated. Raises ValueError that says what is wrong."""
    roots: list[MountRoot] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        path, *options = entry.split(":")
        if unknown := set(options) - {"rw", "unmapped"}:
            raise ValueError(f"has an unknown option {sorted(unknown)[0]!r} in {entry!r}")
        parts = path.split("/")[1:]
        if not path.startswith("/") or {".", "..", ""} & set(parts):
            raise ValueError(f"must hold absolute, normal paths other than /, not {path!r}")
        if path in {root.path for root in roots}:
            raise ValueError(f"has {path!r} twice")
        roots.append(MountRoot(path, "rw" in options, "unmapped" not in options))
    return tuple(roots)


@dataclass(frozen=True, slots=True)
class SandboxSpec(Record):
    """What the caller asked for, defaults filled in.

    ``env`` comes on top of the image's. ``user`` and ``workdir`` are None where the image's count.
    """

    image: str
    limits: Limits = field(default_factory=Limits)
    run: str = ""
    name: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    hostname: str = "sandbox"
    ttl_s: float = 3600.0
    snapshot: str | None = None
    """Made from this snapshot; ``image`` is the snapshot's then."""
    idle_timeout_s: float | None = None
    """Deleted once nothing was asked of it, and nothing ran in it, for so long."""
    copy_from: CopyFrom | None = None
    seccomp: SeccompChoice | None = None
    network: NetworkSpec = NetworkSpec()
    mounts: tuple[MountSpec, ...] | None = None
    """None: those that the sandbox of ``snapshot`` had, if any."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.as_dict(),
            "limits": self.limits.as_dict(),
            "copy_from": self.copy_from and self.copy_from.as_dict(),
            "seccomp": self.seccomp and self.seccomp.as_dict(),
            "network": self.network.as_dict(),
            "mounts": None if self.mounts is None else [one.as_dict() for one in self.mounts],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SandboxSpec:
        given = data.get("copy_from")
        copy_from = CopyFrom(given["sandbox"], tuple(given["paths"])) if given else None
        chosen = data.get("seccomp")
        seccomp = SeccompChoice(**chosen) if chosen else None
        limits = Limits(**data["limits"])
        network = NetworkSpec.from_json(data["network"])
        own = {"limits": limits, "copy_from": copy_from, "seccomp": seccomp, "network": network}
        found = data.get("mounts")
        mounts = None if found is None else tuple(MountSpec(**one) for one in found)
        return cls(**{**data, **own, "mounts": mounts})


@dataclass(frozen=True, slots=True)
class InlineFile:
    """A small file that a sandbox is made with. ``mode`` is 0644 if None; missing directories above
    it are made."""

    path: str
    content: bytes
    mode: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that became of a sandbox. ``seq`` counts from 1 within it; ``at`` is Unix time."""

    seq: int
    at: float
    kind: str
    message: str
    detail: dict[str, Any] = field(default_factory=dict)


class Truncate(StrEnum):
    """Which part of a stream is kept when it is larger than the cap."""

    HEAD = "head"
    TAIL = "tail"
    BOTH = "both"


class Exclusive(StrEnum):
    """What becomes of all other processes of the sandbox while one command has it to itself."""

    KILL = "kill"
    FREEZE = "freeze"


class TimeoutReason(StrEnum):
    """Which time was up."""

    WALL = "wall"
    IDLE_OUTPUT = "idle-output"


@dataclass(frozen=True, slots=True)
class TtySize:
    cols: int = 80
    rows: int = 24


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """One command in a sandbox.

    ``command`` is a list, run as it is, or a string for the sandbox's shell (bash, else sh).
    """

    command: tuple[str, ...] | str
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bytes | None = None
    timeout_s: float = 60.0
    grace_s: float = 2.0
    """Between SIGTERM and SIGKILL once the time is up."""
    max_output_bytes: int = 10 * 1024 * 1024
    """Kept per stream; the rest is drained and counted."""
    truncate: Truncate = Truncate.BOTH
    login: bool = False
    """A login shell; only for a command that is a string."""
    idle_output_timeout_s: float | None = None
    """As ``timeout_s``, but from the last byte of output."""
    merge_stderr: bool = False
    """Both streams through one pipe, in the order in which they were written."""
    tty: TtySize | None = None
    """A terminal instead of pipes; all output is stdout then."""
    detach: bool = False
    """A client that goes does not end it."""
    exclusive: Exclusive | None = None
    """Run while nothing else does (``runtime/exclusive.py``)."""


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One output stream: ``data`` is at most ``max_output_bytes`` of ``total_bytes``."""

    data: bytes
    total_bytes: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended.

    ``exit_code``: its status; 128+n when signal n killed it; 124 when the time was up; 127 and 126
    when it could not be found or executed. CPU time and ``peak_memory_bytes`` are those of the main
    process and the children it waited for (wait4(2)).
    """

    exit_code: int
    signal: int | None
    timed_out: bool
    oom_killed: bool
    stdout: StreamResult
    stderr: StreamResult
    wall_s: float
    cpu_user_s: float
    cpu_system_s: float
    peak_memory_bytes: int
    timeout_reason: TimeoutReason | None = None
    """Which time was up; None unless ``timed_out``."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A regular file in a sandbox, after a read or a write."""

    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Anything that has a name in a sandbox. Names are bytes there, and need not be UTF-8."""

    path: bytes
    """Absolute."""
    type: str
    """``file``, ``directory``, ``symlink``, ``fifo``, ``socket``, ``char-device`` or
    ``block-device``."""
    size_bytes: int
    mode: int
    """Without the type."""
    uid: int
    gid: int
    links: int
    inode: int
    mtime_ns: int
    target: bytes | None = None
    """Where a symlink leads."""
    error: str | None = None
    """Symbol of the errno for which a directory was not looked into."""
