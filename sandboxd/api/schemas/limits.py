"""Limits of a sandbox over HTTP: what may be asked for, and what is in effect."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from sandboxd.api.schemas.base import Answer, Body
from sandboxd.cpu_list import TEXT_MAX, cpu_list, parse_cpu_list
from sandboxd.model import CPU_WEIGHT_MAX, IO_LIMITS, Limits


def _at_least(least: int, value: int) -> int:
    if 0 < value < least:
        raise ValueError(f"must be 0, for no bound, or at least {least}")
    return value


_Bytes = AfterValidator(partial(_at_least, IO_LIMITS["io_read_bps"]))
_Requests = AfterValidator(partial(_at_least, IO_LIMITS["io_read_iops"]))


def _cpus(text: str) -> str:
    if text:
        try:
            text = cpu_list(parse_cpu_list(text))
        except ValueError as error:
            raise ValueError(f"a list of CPUs {error}") from None
    return text


CpuList = Annotated[
    str,
    StringConstraints(max_length=TEXT_MAX, pattern=r"^([0-9]{1,5}(-[0-9]{1,5})?(,|$))*$"),
    AfterValidator(_cpus),
]
Throughput = Annotated[int, Field(ge=0, le=1 << 40), _Bytes]
Operations = Annotated[int, Field(ge=0, le=1 << 31), _Requests]


class LimitsBody(Body):
    """What one sandbox may use; what is left out is the node's default."""

    # And with that hashable: pydantic copies a default that is not, deeply, for every request.
    model_config = ConfigDict(frozen=True)

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
    cpu_weight: int | None = Field(default=None, ge=1, le=CPU_WEIGHT_MAX, examples=[100])
    """Its part of a CPU that others want too is this against the sum of all weights."""
    cpuset: CpuList | None = Field(default=None, examples=["0-3,6"])
    """Which CPUs, of the node's ``cpus``; all of those if empty. Programs see as many of them as
    the limit ``cpus`` has room for, rounded up."""
    io_read_bps: Throughput | None = None
    """Bytes a second that reads of its writable layer take from disk; like the next three without a
    bound if 0, and refused (`limit-unenforceable`) by a node that cannot hold it: layers in memory
    have no disk, and reads of the image are the image server's."""
    io_write_bps: Throughput | None = None
    io_read_iops: Operations | None = None
    """Requests a second."""
    io_write_iops: Operations | None = None

    def over(self, defaults: Limits, most: Limits) -> Limits:
        if not self.model_fields_set:
            return defaults
        named = {
            name: getattr(defaults, name) if value is None else value
            for name, value in self.model_dump().items()
        }
        # Empty is all that a sandbox may have, which is not all that there are.
        named["cpuset"] = named["cpuset"] or most.cpuset
        return Limits(**named)


class LimitsAnswer(Answer):
    cpus: float
    memory_mb: int
    disk_mb: int
    inodes: int
    pids: int
    nofile: int
    shm_mb: int
    cpu_weight: int
    cpuset: str
    """All of the node's ``cpus`` if empty."""
    io_read_bps: int
    """Like the next three without a bound if 0."""
    io_write_bps: int
    io_read_iops: int
    io_write_iops: int
