"""How others do the same: a command in a sandbox of theirs, on the same root.

    bwrap      bwrap --unshare-all, the root bound to /
    crun       crun run of an OCI bundle: same namespaces, id map, limits by cgroup; no seccomp
    crun, no limits    the same without a cgroup: the harder one to beat where moves are slow (v1)
    runc       the same bundle
    chroot     chroot(2) and spawn: no wall at all
    nitrobox   its own Python API in a Python 3.12 process (`nitrobox`)

All is in their favour that can be: their root is one overlay on the image's squashfuse mount, made
before and shared by all runs, where sandboxd makes one for each sandbox; they load no seccomp
filter; they are spawned by a small C program, without a daemon or HTTP. They run in a mount
namespace of their own, which ends with this program.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.floors import ID_BASE, FloorError, cgroup_hierarchies

PROGRAMS: Final = {"bwrap": "bubblewrap", "crun": "crun", "runc": "runc"}
"""What is looked for, and the package that brings it."""

LIMITS: Final = {
    "memory": {"limit": 4 << 30},
    "pids": {"limit": 512},
    "cpu": {"quota": 100_000, "period": 100_000},
}

# crun 1.8 refuses a v2 hierarchy that has controllers beside v1 ones, so it does not see it.
SETUP = """
set -e
mount -t tmpfs -o mode=755 peers "$2"
mkdir "$2/upper" "$2/work" "$2/root" "$2/nitrobox"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" peers "$2/root"
[ -z "$3" ] || umount "$3"
echo ready
exec cat
"""


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers run: `inside` are the words that put a command there."""

    inside: tuple[str, ...]
    stage: Path
    scratch: Path
    group: str
    """Name of the cgroup below which theirs are."""

    @property
    def root(self) -> Path:
        return self.stage / "root"

    def command(self, name: str, number: int, command: Sequence[str]) -> list[str]:
        """`command` in a sandbox of `name`; `number` tells those apart that run at once.

        Raises FloorError where its program is missing.
        """
        if name == "chroot":
            return [*command]
        program, _, without = name.partition(", ")
        if shutil.which(program) is None:
            raise FloorError(f"{program} is missing (package {PROGRAMS[program]})")
        if name == "bwrap":
            walls = ["bwrap", "--unshare-all", "--bind", str(self.root), "/", "--proc", "/proc"]
            return [*walls, "--dev", "/dev", "--", *command]
        taken = len(list(self.scratch.glob("bundle-*")))
        bundle = self.scratch / f"bundle-{taken}-{program}-{number}"
        bundle.mkdir()
        group = None if without else f"/{self.group}/{bundle.name}"
        (bundle / "config.json").write_text(json.dumps(oci_config(self.root, command, group)))
        words = [program, "--root", str(self.scratch / f"state-{program}")]
        if program == "crun":
            words.append(f"--cgroup-manager={'disabled' if without else 'cgroupfs'}")
        return [*words, "run", "--bundle", str(bundle), bundle.name]


@contextlib.contextmanager
def peers(lower: Path, server_pid: int, scratch: Path, group: str) -> Iterator[Peers]:
    """The peers' root over the image's mount `lower`, which is seen in `server_pid`'s namespace."""
    stage = scratch / "stage-peers"
    stage.mkdir()
    unified, legacy = cgroup_hierarchies()
    hidden = str(unified) if unified is not None and legacy else ""
    command = ["nsenter", f"--mount=/proc/{server_pid}/ns/mnt", "--"]
    command += ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", SETUP, "sh"]
    holder = subprocess.Popen(
        [*command, str(lower), str(stage), hidden], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"ready\n":
            raise FloorError("the peers' root cannot be mounted (the reason is above)")
        inside = ("nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--")
        yield Peers(inside, stage, scratch, group)
    finally:
        holder.stdin.close()
        holder.stdout.close()
        holder.wait()


def oci_config(root: Path, command: Sequence[str], group: str | None) -> dict[str, Any]:
    """The configuration of a bundle (OCI runtime specification 1.0.2) like a sandbox of ours; no
    limits without a cgroup."""
    kinds = ("pid", "network", "ipc", "uts", "mount", "cgroup", "user")
    ids = [{"containerID": 0, "hostID": ID_BASE, "size": 65536}]
    capabilities = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_SETGID", "CAP_SETUID"]
    quiet = ["nosuid", "noexec", "nodev"]

    def mount(target: str, kind: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": kind, "source": kind, "options": [*options]}

    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [*command],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": str(root)},
        "hostname": "sandbox",
        "mounts": [
            mount("/proc", "proc"),
            mount("/dev", "tmpfs", "nosuid", "mode=755", "size=64k"),
            mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666"),
            mount("/dev/shm", "tmpfs", *quiet, "mode=1777", "size=64m"),
            mount("/sys", "sysfs", *quiet, "ro"),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in kinds],
            "uidMappings": ids,
            "gidMappings": ids,
            **({} if group is None else {"cgroupsPath": group, "resources": LIMITS}),
        },
    }
