"""``python -m sandboxd.host``: run hostd with what the command line says; needs the host's root, or
makes do with what its user may (``rootless.py``).

Without a lock that it inherits it is a unit of its own (``sandboxd node``), and tells the service
manager when it serves.

It tries first whether the node can keep what a sandbox promises, and refuses to start where it
cannot: a layer of isolation is never skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from typing import Any

from sandboxd.errors import FeatureMissing, SandboxdError
from sandboxd.host import node_lock
from sandboxd.host.hostd import MakeNode, run
from sandboxd.host.ids import SANDBOX_IDS, find_ids
from sandboxd.host.network import NetworkSettings, refusal
from sandboxd.host.node import Node, NodeSettings
from sandboxd.host.rootless import NO_NETWORK, Rootless, RootlessNode, check_oom_score
from sandboxd.host.rootless import node_ids as rootless_ids
from sandboxd.linux import bpf_lsm
from sandboxd.linux.features import Features, probe
from sandboxd.linux.findings import Probe, Status
from sandboxd.linux.id_ranges import IdRange
from sandboxd.linux.process import lower_oom_score
from sandboxd.log_lines import VARIABLE, common_fields, fold_stderr
from sandboxd.model import KernelCaps, parse_mount_roots


def main() -> int:
    parser = argparse.ArgumentParser(prog="sandboxd.host", description=__doc__)
    parser.add_argument("--account", required=True, help="whose subordinate ids the node uses")
    parser.add_argument("--runtime-dir", required=True)
    parser.add_argument("--cgroup-name", required=True)
    parser.add_argument("--squashfuse", default="", help="path, where not the one found")
    parser.add_argument("--no-proc-views", action="store_true", help="show the host's /proc files")
    parser.add_argument("--max-sandboxes", type=int, required=True)
    parser.add_argument("--slots-min", type=int, default=4, help="sandboxes kept ready")
    parser.add_argument("--slots-max", type=int, default=64, help="the same, in high demand")
    parser.add_argument("--slots-primed", type=int, default=8, help="of those, with a root")
    parser.add_argument("--token-file", default="", help="the API's, to know half-made ones")
    parser.add_argument("--sweep-s", type=float, default=60.0, help="how often to look for losses")
    parser.add_argument("--hang-s", type=float, default=30.0, help="silence that is an end")
    parser.add_argument("--oom-score-adjust", type=int, default=0, help="of the node's own parts")
    parser.add_argument("--images-dir", default="", help="where files for the kernel must lie")
    parser.add_argument("--image-backend", default="fuse", choices=("fuse", "kernel"))
    parser.add_argument("--writable-layer", default="auto", choices=("auto", "tmpfs", "ext4"))
    parser.add_argument("--layers-dir", required=True, help="for writable layers on disk")
    parser.add_argument("--mount-roots", default="", help="PATH[:rw][:unmapped],... to mount from")
    parser.add_argument("--kernel-caps", default="{}", help="model.KernelCaps as JSON")
    parser.add_argument("--network-pool", default="", help="addresses of sandboxes; none if empty")
    parser.add_argument("--dns-upstreams", default="", help="the host's own if empty")
    parser.add_argument("--log-format", default="text", choices=("text", "json"))
    parser.add_argument("--node-name", default="", help="in a JSON log")
    parser.add_argument("--watchdog-s", type=float, default=0.2, help="between looks, not as root")
    parser.add_argument("--lifeline-fd", type=int, help="end when this pipe is closed")
    parser.add_argument("--ready-fd", type=int, help="write a byte here when the node serves")
    parser.add_argument("--lock-fd", type=int, help="the runtime directory's lock, where inherited")
    args = parser.parse_args()
    for fd in (args.lifeline_fd, args.ready_fd, args.lock_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    if args.log_format == "json":
        os.environ[VARIABLE] = json.dumps(common_fields(args.node_name, os.environ))
    fold_stderr("hostd")
    if os.geteuid() == 0:
        os.umask(0o022)  # the API's account has to get through to the sockets
    lower_oom_score(args.oom_score_adjust)
    try:
        if args.lock_fd is None:
            os.makedirs(args.runtime_dir, mode=0o755, exist_ok=True)
            node_lock.claim_for_unit(args.runtime_dir)
        # A node that is a unit of its own may be the first to start on this machine.
        os.makedirs(args.layers_dir, mode=0o755, exist_ok=True)
        rootless = os.geteuid() != 0
        ids = rootless_ids() if rootless else find_ids(args.account)
        features, findings = probe(
            args.account,
            sandboxes=args.max_sandboxes,
            writable_layer=args.writable_layer,
            layers_dir=args.layers_dir,
            image_backend=args.image_backend,
        )
        network = NetworkSettings(args.network_pool, args.dns_upstreams)
        why_no_network = refusal(network)
        make: MakeNode = Node
        if rootless:
            check_oom_score()
            network, why_no_network = NetworkSettings(), NO_NETWORK
            assert features.user_ids is not None
            rootless_node = Rootless(features.user_ids, args.watchdog_s, features.delegated)
            make = partial(RootlessNode, rootless=rootless_node)
        settings = NodeSettings(
            ids=ids,
            runtime_dir=args.runtime_dir,
            cgroup_name=args.cgroup_name,
            images_dir=args.images_dir,
            image_backend=args.image_backend,
            squashfuse=args.squashfuse or _squashfuse(features, findings),
            proc_views=not args.no_proc_views,
            slots_min=args.slots_min,
            slots_max=args.slots_max,
            slots_primed=args.slots_primed,
            token_file=args.token_file,
            sweep_s=args.sweep_s,
            hang_s=args.hang_s,
            writable_layer=features.writable_layer or "",
            overlay_detached=features.overlay_detached,
            layers_dir=args.layers_dir,
            describe=_describe(features, args.max_sandboxes, why_no_network),
            network=network,
            mount_roots=parse_mount_roots(args.mount_roots),
            kernel_caps=KernelCaps(**json.loads(args.kernel_caps)),
        )
        if features.security_attributes == "program":
            # The descriptor lives as long as this process, and with it the node.
            bpf_lsm.refuse_security_attributes(IdRange(ids.base, SANDBOX_IDS))
        run(settings, args.lifeline_fd, args.ready_fd, make)
    except (SandboxdError, OSError) as error:
        hint = getattr(error, "hint", None)
        print(f"hostd: {error}" + (f" ({hint})" if hint else ""), file=sys.stderr)
        return 1
    return 0


def _squashfuse(features: Features, findings: list[Probe]) -> str:
    """Refuse a node with a failed probe, and return the program that serves its images."""
    for finding in findings:
        if finding.status is Status.FAIL:
            raise FeatureMissing(f"{finding.name}: {finding.detail}", hint=finding.remedy)
    if features.squashfuse is None:
        raise FeatureMissing("no squashfuse_ll serves here", hint="apt-get install squashfuse")
    return features.squashfuse


def _describe(features: Features, max_sandboxes: int, network: str) -> dict[str, Any]:
    """What the daemon is told of the node; nothing of it is a secret."""
    told = features.to_json()
    del told["cgroup"]
    return {
        "mode": "service" if features.user_ids is None else "rootless",
        "ids": "single" if features.ids == 1 else "range",
        "features": told,
        "capacity": {"max_sandboxes": max_sandboxes},
        "network": {"refusal": network},
    }


if __name__ == "__main__":
    sys.exit(main())
