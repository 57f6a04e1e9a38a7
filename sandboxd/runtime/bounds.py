"""What this node allows of what may be asked for."""

from __future__ import annotations

from dataclasses import asdict

from sandboxd.config import Config
from sandboxd.errors import RequestError
from sandboxd.model import SandboxSpec
from sandboxd.runtime.network import check_network


def check_allowed(spec: SandboxSpec, config: Config) -> None:
    """Raises RequestError naming the field of ``spec`` that this node does not allow, and
    NetworkUnavailable."""
    most = asdict(config.max_limits)
    for name, value in asdict(spec.limits).items():
        if value > most[name]:
            raise RequestError(
                f"limits.{name} is {value:g}, this node allows {most[name]:g}",
                field=f"limits.{name}",
                maximum=most[name],
            )
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
