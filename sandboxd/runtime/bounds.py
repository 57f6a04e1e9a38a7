"""What this node allows of what may be asked for."""

from __future__ import annotations

from sandboxd.config import Config
from sandboxd.errors import RequestError
from sandboxd.model import SandboxSpec
from sandboxd.runtime.limits import check_maximum
from sandboxd.runtime.network import check_network


def check_allowed(spec: SandboxSpec, config: Config) -> None:
    """Raises RequestError naming the field of ``spec`` that this node does not allow,
    CpusetUnavailable, NetworkNotAllowed and NetworkUnavailable."""
    check_maximum(spec.limits, config.max_limits)
    check_ttl(spec.ttl_s, config)
    check_network(spec, config)


def check_ttl(ttl_s: float, config: Config) -> None:
    """Raises RequestError where this node does not allow it."""
    if ttl_s > config.max_ttl_s:
        raise RequestError(
            f"ttl_s is {ttl_s:g}, this node allows {config.max_ttl_s:g}",
            field="ttl_s",
            maximum=config.max_ttl_s,
        )
