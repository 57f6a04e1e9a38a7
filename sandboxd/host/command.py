"""How hostd is started, from a configuration: by a daemon that has its own, or as a unit."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict

from sandboxd.config import Config


def cgroup_name(config: Config) -> str:
    """One name for each runtime directory: two nodes never touch each other's cgroups."""
    instance = hashlib.sha256(os.path.realpath(config.runtime_dir).encode()).hexdigest()[:8]
    return f"{config.cgroup_root}-{instance}"


def hostd_command(config: Config) -> list[str]:
    """The command line of ``sandboxd.host``."""
    return [
        sys.executable,
        "-m",
        "sandboxd.host",
        *("--account", config.user),
        *("--runtime-dir", config.runtime_dir),
        *("--cgroup-name", cgroup_name(config)),
        *("--squashfuse", config.squashfuse),
        *(() if config.proc_views else ("--no-proc-views",)),
        *("--max-sandboxes", str(config.max_sandboxes)),
        *("--images-dir", config.images_dir),
        *("--image-backend", config.image_backend),
        *("--writable-layer", config.writable_layer),
        *("--layers-dir", config.state_dir),
        *("--slots-min", str(config.slots_min)),
        *("--slots-max", str(config.slots_max)),
        *("--slots-primed", str(config.slots_primed)),
        *("--token-file", config.token_file),
        *("--log-format", config.log_format, "--node-name", config.node_name),
        *("--sweep-s", str(config.sweep_s), "--hang-s", str(config.hang_s)),
        *("--oom-score-adjust", str(config.oom_score_adjust)),
        *("--watchdog-s", str(config.watchdog_s)),
        *("--mount-roots", config.mount_roots),
        *("--kernel-caps", json.dumps(asdict(config.kernel_caps))),
        *("--network-pool", config.network_pool, "--dns-upstreams", config.dns_upstreams),
    ]
