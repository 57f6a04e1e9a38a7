"""``python -m sandboxd.host``: run hostd with what the command line says; needs the host's root."""

from __future__ import annotations

import argparse
import json
import os
import sys

from sandboxd.errors import SandboxdError
from sandboxd.host.hostd import NodeSettings, run
from sandboxd.host.ids import find_ids


def main() -> int:
    parser = argparse.ArgumentParser(prog="sandboxd.host")
    parser.add_argument("--account", required=True)
    parser.add_argument("--runtime-dir", required=True)
    parser.add_argument("--cgroup-name", required=True)
    parser.add_argument("--squashfuse", required=True)
    parser.add_argument("--describe", type=json.loads, default={})
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--ready-fd", type=int)
    args = parser.parse_args()
    for fd in (args.lifeline_fd, args.ready_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    try:
        settings = NodeSettings(
            ids=find_ids(args.account),
            runtime_dir=args.runtime_dir,
            cgroup_name=args.cgroup_name,
            squashfuse=args.squashfuse,
            describe=args.describe,
        )
        run(settings, args.lifeline_fd, args.ready_fd)
    except (SandboxdError, OSError) as error:
        print(f"hostd: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
