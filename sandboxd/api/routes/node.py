"""The node: what it can do, what it holds each limit with, how much is on it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from sandboxd import __version__, errors
from sandboxd.api.answers import JsonAnswer
from sandboxd.api.exception_handlers import documented
from sandboxd.api.routes.drain import drain_state
from sandboxd.api.schemas.node import NodeAnswer
from sandboxd.config import Config
from sandboxd.cpu_list import cpu_list
from sandboxd.runtime.manager import Runtime

router = APIRouter(prefix="/v1/node", tags=["node"])


@router.get("", response_model=NodeAnswer, responses=documented(errors.NodeUnavailable))
async def node(request: Request) -> Response:
    """Features, limits and how they are enforced, capacity; asked from the launcher now."""
    runtime: Runtime = request.app.state.runtime
    config = runtime.config
    said = await runtime.node()

    def table(name: str) -> dict[str, Any]:
        value = said.get(name)
        return value if isinstance(value, dict) else {}

    return JsonAnswer(
        {
            "name": config.node_name,
            "version": __version__,
            "mode": str(said.get("mode") or "service"),
            "ids": str(said.get("ids") or "range"),
            "cgroup": str(said.get("cgroup") or "v1"),
            "ready": runtime.ready,
            "sandboxes": runtime.counts(),
            "max_sandboxes": config.max_sandboxes,
            "default_limits": asdict(config.default_limits),
            "max_limits": asdict(config.max_limits),
            "max_ttl_s": config.max_ttl_s,
            "max_timeout_s": config.max_timeout_s,
            "max_output_bytes": config.max_output_bytes,
            "network": _network(config, said.get("network")),
            "features": table("features"),
            "enforcement": table("limits"),
            "kernel_caps": table("kernel_caps"),
            "cpus": cpu_list(runtime.cpus_allowed),
            "capacity": table("capacity"),
            "counts": table("counts"),
            "admission": {**runtime.admission.to_json(), "drain": drain_state(runtime)},
        }
    )


def _network(config: Config, said: Any) -> dict[str, Any]:
    refusal = str(said.get("refusal", "")) if isinstance(said, dict) else "the node is older"
    there = not refusal
    return {
        "allow": there,
        "full": there and config.allow_full_network,
        "run_network": there,
        "ipv6": False,
        "bandwidth_mbit": config.network_bandwidth_mbit,
        "refusal": refusal,
    }
