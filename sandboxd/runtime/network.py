"""What the launcher is told of a sandbox's network, and what the node's configuration allows."""

from __future__ import annotations

import re
from typing import Any, Final

from sandboxd.config import Config
from sandboxd.errors import NetworkNotAllowed, NetworkUnavailable
from sandboxd.model import NetworkMode, SandboxSpec

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def check_network(spec: SandboxSpec, config: Config) -> None:
    """Raises NetworkNotAllowed and NetworkUnavailable."""
    network = spec.network
    if network.mode is NetworkMode.NONE:
        return
    if not config.network_pool:
        raise NetworkUnavailable(
            "this node gives no network: network_pool is empty", hint="network none works"
        )
    if network.mode is NetworkMode.FULL and not config.allow_full_network:
        raise NetworkNotAllowed(
            "this node does not allow network full",
            hint="list what is needed, or set allow_full_network",
            field="network",
        )
    if (network.bandwidth_mbit or 0) > config.network_bandwidth_mbit:
        raise NetworkNotAllowed(
            f"network.bandwidth_mbit is {network.bandwidth_mbit}, this node allows"
            f" {config.network_bandwidth_mbit}",
            field="network.bandwidth_mbit",
            maximum=config.network_bandwidth_mbit,
        )


def network_request(sandbox_id: str, spec: SandboxSpec, config: Config) -> dict[str, Any] | None:
    """What the router is to be asked, or None where there is only a loopback."""
    network = spec.network
    if network.mode is NetworkMode.NONE:
        return None
    names = {spec.name.lower(), spec.hostname.lower()} - {"", "sandbox", "localhost"}
    return {
        "sandbox": sandbox_id,
        "mode": str(network.mode),
        "allow": list(network.allow),
        "bandwidth_mbit": network.bandwidth_mbit or config.network_bandwidth_mbit,
        "run": spec.run if network.run_network else "",
        "names": sorted(name for name in names if _NAME.fullmatch(name)),
    }
