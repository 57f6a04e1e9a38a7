"""What goes in and out over HTTP: the public spelling of ``sandboxd.model``.

Bodies are strict: an unknown field, a number in a string, NaN, a NUL byte in a string or an ``=``
in a variable's name is refused (``request-invalid``), never repaired. What a node allows beyond
these ranges is its configuration's to say (``GET /v1/node``).
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from sandboxd.api import schemas_base
from sandboxd.api.schemas_mounts import MountAnswer, Mounts, mount_specs
from sandboxd.api.schemas_network import NetworkAnswer, NetworkChoice, network_spec
from sandboxd.config import Config
from sandboxd.images.store import NAME_MAX, NAME_PATTERN
from sandboxd.model import (
    CopyFrom,
    Exclusive,
    ExecRequest,
    InlineFile,
    Limits,
    SandboxSpec,
    Truncate,
    TtySize,
)

Body = schemas_base.Body
Answer = schemas_base.Answer

FILES_MAX: Final = 64
"""Inline files of one create: it waits for each of them."""
PATHS_MAX: Final = 64
"""Of one copy."""
PATH_BYTES_MAX: Final = 4095
"""PATH_MAX of the kernel without its NUL."""


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL byte")
    return text


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("must be an absolute path")
    if len(text.encode()) > PATH_BYTES_MAX:
        raise ValueError(f"has more than {PATH_BYTES_MAX} bytes")
    return _no_nul(text)


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("a variable's name must not be empty or hold '='")
    return _no_nul(name)


Text = Annotated[str, AfterValidator(_no_nul)]
AbsolutePath = Annotated[str, AfterValidator(_path)]
Word = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
User = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=128, pattern=r"^[^\x00-\x20\x7f:/]+(:[^\x00-\x20\x7f:/]+)?$"
    ),
]
Environment = Annotated[
    dict[Annotated[str, AfterValidator(_variable)], Text], Field(max_length=1024)
]
ProfileName = Annotated[
    str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
]
ImageName = Annotated[str, StringConstraints(max_length=NAME_MAX, pattern=f"^{NAME_PATTERN}$")]
Hostname = Annotated[
    str,
    StringConstraints(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$"),
]


ExecId = Annotated[
    str,
    StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    Field(examples=["ex-w5t3d6c2nq4mzk7xq3v4y2a5pe"]),
]


# --- sandboxes -------------------------------------------------------------------------------


class LimitsBody(Body):
    """What one sandbox may use; what is left out is the node's default."""

    cpus: float | None = Field(default=None, ge=0.01, le=4096, examples=[1.0])
    memory_mb: int | None = Field(default=None, ge=16, le=1 << 24, examples=[2048])
    disk_mb: int | None = Field(default=None, ge=1, le=1 << 24, examples=[2048])
    """Bytes of the writable layer. Its pages are memory of the node."""
    inodes: int | None = Field(default=None, ge=16, le=1 << 28)
    """Files of the writable layer."""
    pids: int | None = Field(default=None, ge=8, le=1 << 22, examples=[512])
    nofile: int | None = Field(default=None, ge=16, le=1 << 20)
    """Open files of each process."""
    shm_mb: int | None = Field(default=None, ge=1, le=1 << 24)
    """Size of /dev/shm."""

    def over(self, defaults: Limits) -> Limits:
        return Limits(
            **{
                name: getattr(defaults, name) if value is None else value
                for name, value in self.model_dump().items()
            }
        )


class InlineFileBody(Body):
    """A small file that the sandbox is made with; large ones are PUT afterwards."""

    path: AbsolutePath = Field(examples=["/work/task.json"])
    content: str | None = None
    """UTF-8 text; exactly one of this and ``content_base64`` is given."""
    content_base64: str | None = None
    mode: Annotated[str, StringConstraints(pattern="^[0-7]{3,4}$")] | None = None
    """Octal; 0644 if left out."""
    user: User | None = None
    """Who writes it, and owns it; the sandbox's user if left out."""

    @model_validator(mode="after")
    def _one_content(self) -> InlineFileBody:
        if (self.content is None) == (self.content_base64 is None):
            raise ValueError("exactly one of content and content_base64 must be given")
        return self

    def to_file(self) -> InlineFile:
        """Raises ValueError for what is no base64."""
        if self.content_base64 is None:
            content = (self.content or "").encode()
        else:
            try:
                content = base64.b64decode(self.content_base64, validate=True)
            except ValueError as error:
                raise ValueError(f"content_base64: {error}") from error
        mode = None if self.mode is None else int(self.mode, 8)
        return InlineFile(self.path, content, mode, self.user)


class CopyFromBody(Body):
    """Files of another sandbox of this node. It may run, be paused, or have failed; its processes
    are frozen while its files are copied."""

    sandbox: Annotated[str, Field(max_length=64)] = Field(
        examples=["sb-w5t3d6c2nq4mzk7xq3v4y2a5pe"]
    )
    paths: Annotated[list[AbsolutePath], Field(min_length=1, max_length=PATHS_MAX)] = Field(
        examples=[["/work", "/tmp/result.json"]]
    )
    """Files, or directories with all that is in them; after that the new sandbox has at each path
    exactly what the other has, and all else as the image has it. A path that is a symlink, or leads
    over one, is refused (`symlink-in-path`). Sockets and devices are left out."""

    def to_copy(self) -> CopyFrom:
        """Raises ValueError for ``/`` and for what has ``..`` in it."""
        return CopyFrom(self.sandbox, tuple(_normal(path) for path in self.paths))


def _normal(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise ValueError(f"copy_from.paths: {path!r} is the root, or has '..' in it")
    return "/" + "/".join(parts)


class CreateBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "image": "debian-python",
                    "run": "grpo-17",
                    "labels": {"task": "django-11099"},
                    "env": {"PYTHONDONTWRITEBYTECODE": "1"},
                    "limits": {"cpus": 1, "memory_mb": 2048, "disk_mb": 1024},
                    "ttl_s": 1800,
                }
            ]
        }
    )

    image: ImageName | None = None
    """Name of an image of this node, without ``.sif``; this, ``snapshot`` or ``copy_from`` must be
    given."""
    snapshot: Annotated[str, Field(pattern=r"^sn-[a-z2-7]+$", max_length=64)] | None = None
    """A fork: begin from this snapshot, with its image."""
    copy_from: CopyFromBody | None = None
    """Begin from the image of another sandbox, with some of that one's files and nothing else of
    it: how a verdict that counts is taken, since whatever else was changed there (an interpreter,
    ``/etc/ld.so.preload``) stays behind."""
    run: Word = ""
    """Who owns it: a run can be listed and deleted as a whole."""
    name: Word = ""
    labels: Annotated[dict[Word, Word], Field(max_length=64)] = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)
    """On top of the image's."""
    seccomp: ProfileName | dict[str, Any] | None = Field(
        default=None,
        examples=[
            {
                "defaultAction": "SCMP_ACT_ALLOW",
                "architectures": ["SCMP_ARCH_X86_64"],
                "syscalls": [{"names": ["ptrace"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
            }
        ],
    )
    """A seccomp profile of its own: the name of one that the node has, or the ``linux.seccomp``
    object of the OCI runtime specification. It is loaded on top of the node's own, so that it can
    only take away, by every command just before its exec: it must allow ``execve``."""
    workdir: AbsolutePath | None = None
    """Where commands start; the image's if left out. Made if it is missing."""
    user: User | None = None
    """``name``, ``uid``, or either with ``:group``; the image's if left out."""
    limits: LimitsBody = LimitsBody()
    ttl_s: float | None = Field(default=None, gt=0, le=31_536_000)
    """Seconds after which it is deleted by itself."""
    idle_timeout_s: float | None = Field(default=None, ge=1, le=31_536_000)
    """Deleted earlier, once nothing was asked of it and no command ran in it for so long."""
    hostname: Hostname = "sandbox"
    network: NetworkChoice = "none"
    """``none`` is a loopback; ``full`` only where the node's configuration has it."""
    mounts: Mounts | None = None
    """Files of the node; if left out those of the ``snapshot``'s sandbox, or none."""
    files: Annotated[list[InlineFileBody], Field(max_length=FILES_MAX)] = Field(
        default_factory=list
    )
    """Small files, there before the create is answered."""
    wait_s: float = Field(default=0.0, ge=0, le=600)
    """How long to wait for room on a full node, instead of ``node-overloaded`` at once."""

    @model_validator(mode="after")
    def _one_origin(self) -> CreateBody:
        if self.copy_from is not None:
            if self.snapshot is not None:
                raise ValueError("give either snapshot or copy_from")
            self.copy_from.to_copy()
        elif (self.image is None) == (self.snapshot is None):
            raise ValueError("give either image or snapshot")
        network_spec(self.network, self.run)
        mount_specs(self.mounts)
        return self

    def to_spec(self, config: Config) -> SandboxSpec:
        return SandboxSpec(
            image=self.image or "",
            snapshot=self.snapshot,
            copy_from=self.copy_from.to_copy() if self.copy_from else None,
            limits=self.limits.over(config.default_limits),
            run=self.run,
            name=self.name,
            labels=self.labels,
            env=self.env,
            workdir=self.workdir,
            user=self.user,
            hostname=self.hostname,
            ttl_s=config.default_ttl_s if self.ttl_s is None else self.ttl_s,
            idle_timeout_s=self.idle_timeout_s,
            network=network_spec(self.network, self.run),
            mounts=mount_specs(self.mounts),
        )


class LimitsAnswer(Answer):
    cpus: float
    memory_mb: int
    disk_mb: int
    inodes: int
    pids: int
    nofile: int
    shm_mb: int


class FailureAnswer(Answer):
    code: str
    message: str
    cause: Literal["workload", "request", "node"]
    retryable: bool


class SeccompAnswer(Answer):
    name: str
    """Empty for a profile that came with the request."""
    digest: str = Field(examples=["sha256:9f86d081884c7d659a2feaa0c55ad015"])


class CopyFromAnswer(Answer):
    sandbox: str
    paths: list[str]


class SandboxAnswer(Answer):
    id: str = Field(examples=["sb-w5t3d6c2nq4mzk7xq3v4y2a5pe"])
    state: Literal["creating", "running", "paused", "failed", "deleting"]
    image: str
    snapshot: str | None
    """What it was forked from."""
    copy_from: CopyFromAnswer | None
    """Which files of which sandbox it was made with."""
    seccomp: SeccompAnswer | None
    """The profile of its own that its commands run under, on top of the node's."""
    image_key: str
    """Names the very file that is mounted."""
    run: str
    name: str
    labels: dict[str, str]
    node: str
    limits: LimitsAnswer
    """Those in effect, the node's defaults filled in."""
    enforcement: dict[str, Any]
    """How this node holds each limit: ``enforced``, ``watchdog`` or ``none``."""
    user: str
    workdir: str
    hostname: str
    network: Literal["none", "full"] | NetworkAnswer
    mounts: list[MountAnswer]
    ttl_s: float
    idle_timeout_s: float | None
    created_at: str = Field(examples=["2025-11-29T15:43:07.125Z"])
    expires_at: str
    phases_ms: dict[str, float]
    """Where the milliseconds of its making went."""
    failure: FailureAnswer | None
    """Why nothing can run in it any more; null unless ``state`` is ``failed``."""


class SandboxList(Answer):
    sandboxes: list[SandboxAnswer]
    next: str | None
    """Give it as ``after`` to get the following page; null at the end."""


# --- exec ------------------------------------------------------------------------------------


def stdin_bytes(text: str | None, text_base64: str | None) -> bytes | None:
    """What a command is to read; None for /dev/null. Raises ValueError for what is no base64."""
    if text_base64 is None:
        return None if text is None else text.encode()
    try:
        return base64.b64decode(text_base64, validate=True)
    except binascii.Error as error:
        raise ValueError(f"stdin_base64: {error}") from error


class TtyBody(Body):
    """A terminal and its size in characters."""

    cols: int = Field(default=80, ge=1, le=0xFFFF)
    rows: int = Field(default=24, ge=1, le=0xFFFF)

    def to_size(self) -> TtySize:
        return TtySize(self.cols, self.rows)


class ExecBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"command": ["pytest", "-q"], "cwd": "/work", "timeout_s": 300},
                {"command": "cd /work && git diff | head -100"},
            ]
        }
    )

    command: Annotated[list[Text], Field(min_length=1)] | Annotated[Text, Field(min_length=1)]
    """A list is run as it is; a string by the sandbox's bash, or sh where there is none."""
    cwd: AbsolutePath | None = None
    """The sandbox's workdir if left out."""
    env: Environment = Field(default_factory=dict)
    """On top of the sandbox's."""
    user: User | None = None
    stdin: str | None = None
    """UTF-8 text; /dev/null if neither this nor ``stdin_base64`` is given."""
    stdin_base64: str | None = None
    timeout_s: float | None = Field(default=None, gt=0)
    """Then its whole process tree is killed and ``timed_out`` is true."""
    grace_s: float = Field(default=2.0, ge=0, le=60)
    """Between SIGTERM and SIGKILL once the time is up."""
    max_output_bytes: int | None = Field(default=None, ge=0)
    """Kept of each stream; the rest is read and counted."""
    truncate: Literal["head", "tail", "both"] = "both"
    """Which part of a longer stream is kept; ``both``: half from each end."""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    """Of the output in the answer; in ``utf-8`` what is none is replaced by U+FFFD."""

    login: bool = False
    """Run a command that is a string by a login shell."""
    idle_output_timeout_s: float | None = Field(default=None, gt=0)
    """As ``timeout_s``, from the last byte of output."""
    merge_stderr: bool = False
    """Both streams as one, in the order in which they were written, as ``stdout``."""
    tty: TtyBody | None = None
    """Run it in a terminal of its own: all output is ``stdout`` then, and ``stdin`` is typed in.
    ``TERM`` is set if nobody else does."""
    detach: bool = False
    """Whether it goes on without its client. A stream of it can be taken up later."""
    exec_id: ExecId | None = None
    """To kill it by, and to take up its stream; made up for a stream if left out. Not that of
    another command that runs in this sandbox."""
    exclusive: bool | Literal["kill", "freeze"] = False
    """Run it with nothing else alive in the sandbox: every other process, whoever started it, is
    killed first (`true` or `"kill"`), or frozen until it has ended (`"freeze"`). Until then any
    other command, session or file request is refused (`sandbox-exclusive`); those under way end by
    signal 9. What the command leaves behind is killed before its answer."""

    @model_validator(mode="after")
    def _one_stdin(self) -> ExecBody:
        if self.stdin is not None and self.stdin_base64 is not None:
            raise ValueError("stdin and stdin_base64 exclude each other")
        if self.command[0] == "":
            raise ValueError("the command's first word must not be empty")
        if self.login and not isinstance(self.command, str):
            raise ValueError("login is for a command that is a string")
        if self.exclusive and self.detach:
            raise ValueError("an exclusive command cannot be detached")
        return self

    def stdin_bytes(self) -> bytes | None:
        """Raises ValueError for what is no base64."""
        return stdin_bytes(self.stdin, self.stdin_base64)

    def to_request(self, config: Config) -> ExecRequest:
        """Raises ValueError for what is no base64."""
        return ExecRequest(
            command=self.command if isinstance(self.command, str) else tuple(self.command),
            cwd=self.cwd,
            env=self.env,
            user=self.user,
            stdin=self.stdin_bytes(),
            timeout_s=config.default_timeout_s if self.timeout_s is None else self.timeout_s,
            grace_s=self.grace_s,
            max_output_bytes=(
                config.default_output_bytes
                if self.max_output_bytes is None
                else self.max_output_bytes
            ),
            truncate=Truncate(self.truncate),
            login=self.login,
            idle_output_timeout_s=self.idle_output_timeout_s,
            merge_stderr=self.merge_stderr,
            tty=self.tty.to_size() if self.tty else None,
            detach=self.detach,
            exclusive=_exclusive(self.exclusive),
        )


def _exclusive(asked: bool | str) -> Exclusive | None:
    if isinstance(asked, str):
        return Exclusive(asked)
    return Exclusive.KILL if asked else None


class ExecAnswer(Answer):
    exit_code: int
    """The command's own; 128+n when signal n ended it, 124 when the time was up, 127 not found,
    126 not executable."""
    signal: int | None
    timed_out: bool
    timeout_reason: Literal["wall", "idle-output"] | None
    """Which time was up."""
    oom_killed: bool
    stdout: str
    stderr: str
    encoding: Literal["utf-8", "base64"]
    stdout_total_bytes: int
    stderr_total_bytes: int
    stdout_truncated: bool
    stderr_truncated: bool
    wall_s: float
    cpu_user_s: float
    cpu_system_s: float
    peak_memory_bytes: int


# --- files, images, the node -----------------------------------------------------------------


class FileAnswer(Answer):
    path: str
    size_bytes: int
    mode: str = Field(examples=["0644"])
    uid: int
    gid: int
    mtime_ns: int
    """Nanoseconds since the epoch; a number, as a program may set what no calendar has."""


class ImageBody(Body):
    image: ImageName = Field(examples=["debian-python"])


class ImageAnswer(Answer):
    name: str
    size_bytes: int | None
    modified_at: str | None
    mounted: bool
    users: int
    """Sandboxes that have it as their root."""


class ImageList(Answer):
    images: list[ImageAnswer]
    truncated: bool
    """There are more than are listed here."""


class PreparedImageAnswer(Answer):
    name: str
    key: str
    size_bytes: int
    mounted: Literal[True]
    user: str
    workdir: str
    labels: dict[str, str]


class DrainState(Answer):
    draining: bool
    why: Literal["asked", "job-end"] | None
    since: str | None
    deadline: str | None
    """When everything is deleted."""
    job_end: str | None
    """Of the Slurm job this node is part of."""


class AdmissionAnswer(Answer):
    open: bool
    closed_by: list[str] = Field(examples=[["memory-low"], ["draining"], ["sandboxes"]])
    """``draining``; ``memory-low``, ``memory-pressure``, ``io-pressure``, ``cpu-pressure``; or
    what all is promised of."""
    capacity: dict[str, float]
    """What may be promised: ``sandboxes``, ``memory_mb`` (disk included), ``cpus``, ``pids``,
    ``fds``."""
    used: dict[str, float]
    """What is."""
    waiting: int
    """Creates that wait for room."""
    pressure: dict[str, Any]
    """``available_mb`` of memory, and ``stalls``: percent of the last 10 s in which some, or all,
    waited for ``memory``, ``cpu`` and ``io``."""
    drain: DrainState


class NodeNetwork(Answer):
    """The network that a sandbox can have here."""

    allow: bool
    """Whether a list is possible."""
    full: bool
    run_network: bool
    ipv6: Literal[False]
    bandwidth_mbit: int
    """The most, in each direction."""
    refusal: str
    """Why there is none, or empty."""


class NodeAnswer(Answer):
    name: str
    version: str
    ready: bool
    sandboxes: dict[str, int]
    """Number by state."""
    max_sandboxes: int
    default_limits: LimitsAnswer
    max_limits: LimitsAnswer
    max_ttl_s: float
    max_timeout_s: float
    max_output_bytes: int
    network: NodeNetwork
    features: dict[str, Any]
    """What the node can do, as tried out at its start."""
    enforcement: dict[str, Any]
    capacity: dict[str, Any]
    counts: dict[str, Any]
    admission: AdmissionAnswer
    """What is promised of what there is, and why nothing more is taken on, if so."""


class HealthAnswer(Answer):
    status: Literal["ok"]


# --- errors ----------------------------------------------------------------------------------


class ErrorDetail(Answer):
    code: str = Field(examples=["sandbox-not-found"])
    message: str
    cause: Literal["workload", "request", "node"]
    """Whose fault: the policy's program, this request, or the machine."""
    retryable: bool
    """Whether the same request may succeed if it is sent again."""
    hint: str | None
    detail: dict[str, Any]


class ErrorAnswer(Answer):
    error: ErrorDetail
