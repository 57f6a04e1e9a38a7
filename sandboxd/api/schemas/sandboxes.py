"""Sandboxes: what one is made of, and what is said of it."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Final, Literal

from pydantic import (
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from sandboxd.api.schemas.base import (
    AbsolutePath,
    Answer,
    Body,
    Environment,
    Hostname,
    ImageName,
    ProfileName,
    User,
    Word,
)
from sandboxd.api.schemas.limits import LimitsAnswer, LimitsBody
from sandboxd.api.schemas.mounts import MountAnswer, Mounts, mount_specs
from sandboxd.api.schemas.network import NetworkAnswer, NetworkChoice, network_spec
from sandboxd.config import Config
from sandboxd.model import (
    CopyFrom,
    InlineFile,
    SandboxSpec,
)

FILES_MAX: Final = 64
"""Inline files of one create: it waits for each of them."""
PATHS_MAX: Final = 64
"""Of one copy."""


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
            limits=self.limits.over(config.default_limits, config.max_limits),
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
