"""The node: what it can do, what it has promised, and whether it takes more on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from sandboxd.api.schemas.base import Answer
from sandboxd.api.schemas.limits import LimitsAnswer


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
    mode: Literal["service", "rootless"]
    """Started by root, or by an ordinary user, whose sandboxes have no network but a loopback and
    no files of the host."""
    ids: Literal["range", "single"]
    """What users a sandbox has. `single`: its root alone, and files of other owners cannot be
    changed."""
    cgroup: Literal["v1", "v2", "watchdog"]
    """What holds memory and processes; `enforcement` says it of each limit."""
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
    kernel_caps: dict[str, int] = Field(examples=[{"inotify_instances": 128, "ptys": 64}])
    """What a sandbox may hold of what no cgroup counts; 0 is refused altogether."""
    cpus: str = Field(examples=["0-63"])
    """Those that ``limits.cpuset`` may name."""
    capacity: dict[str, Any]
    counts: dict[str, Any]
    admission: AdmissionAnswer
    """What is promised of what there is, and why nothing more is taken on, if so."""


class HealthAnswer(Answer):
    status: Literal["ok"]
