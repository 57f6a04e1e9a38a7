"""Whether this node allows the limits that were asked for, and can hold them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Final

from sandboxd.cpu_list import cpu_list, parse_cpu_list
from sandboxd.errors import CpusetUnavailable, LimitUnenforceable, RequestError
from sandboxd.model import IO_LIMITS, Enforcement, Limits

_OPTIONAL: Final = {one.name: one.default for one in fields(Limits)}
"""Those that ask for nothing at their default; all others are always held, or said not to be."""
_HINTS: Final = {
    **dict.fromkeys(
        IO_LIMITS,
        "only ext4 layers (writable_layer) have a device, and cgroup v1 holds reads alone",
    ),
    "cpuset": "no cgroup hierarchy that this node may use has the cpuset controller",
    "cpu_weight": "no cgroup hierarchy that this node may use has the cpu controller",
}


def check_maximum(limits: Limits, most: Limits) -> None:
    """Raises RequestError, and CpusetUnavailable, naming what is above the configured maximum."""
    maximum = most.as_dict()
    for name, value in limits.as_dict().items():
        top = maximum[name]
        if name == "cpuset":
            _check_cpus(value, parse_cpu_list(top) if top else ())
        elif (top and (value > top or not value)) if name in IO_LIMITS else value > top:
            told = f"{value:g}" if value else "without a bound"
            raise RequestError(
                f"limits.{name} is {told}, this node allows {top:g}",
                field=f"limits.{name}",
                maximum=top,
            )


def check_enforceable(
    limits: Limits, enforcement: Mapping[str, Any], cpus: Collection[int]
) -> None:
    """Raises CpusetUnavailable and LimitUnenforceable. What the node has not said yet (nothing can
    be made then either) is not checked."""
    for name in _HINTS:
        if getattr(limits, name) != _OPTIONAL[name] and enforcement.get(name) == Enforcement.NONE:
            raise LimitUnenforceable(
                f"this node cannot hold limits.{name}",
                hint=_HINTS[name],
                field=f"limits.{name}",
            )
    _check_cpus(limits.cpuset, cpus)


def _check_cpus(cpuset: str, there: Collection[int]) -> None:
    missing = set(parse_cpu_list(cpuset)) - set(there) if cpuset and there else ()
    if missing:
        raise CpusetUnavailable(
            f"limits.cpuset has CPUs {cpu_list(missing)}, sandboxes of this node may have"
            f" {cpu_list(there)}",
            field="limits.cpuset",
            cpus=cpu_list(there),
        )
