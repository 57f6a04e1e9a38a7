"""What this node can do, as one frozen ``Features``, and the same told to an operator.

Every answer comes from doing the thing (``probes``), in short-lived children with time-outs: never
from the kernel's version or from being uid 0. Nothing is left behind, and all of it takes well
under 3 s. This is the one module of the layer that speaks the product's words.

An ordinary user gets another node than root (``user_ids``), and is told what that one does.

``fail``  sandboxes cannot be made as promised: the daemon refuses to serve
``warn``  they can, but something is slower, scarcer or not held; the node says so
``ok``    as it should be
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from sandboxd.linux import (
    cgroup,
    delegation,
    features_attributes,
    features_user,
    id_ranges,
    procfs,
    programs,
    settings,
)
from sandboxd.linux.cgroup import CgroupLayout
from sandboxd.linux.child import ChildError
from sandboxd.linux.delegation import Delegated
from sandboxd.linux.findings import Findings, Probe, Status, reason_of
from sandboxd.linux.id_ranges import IdRange
from sandboxd.linux.probes import cgroups, mounts, processes
from sandboxd.linux.user_ids import UserIds
from sandboxd.model import Enforcement

SANDBOX_IDS: Final = 65_536
"""Ids of a sandbox: apt needs them up to 65,534."""

NODE_IDS: Final = SANDBOX_IDS + 2
"""Ids of the node's user namespace: a sandbox's, that of the launcher, that of FUSE servers."""

ACCOUNT_IDS: Final = 65_540
"""Ids the account must have in /etc/subuid and /etc/subgid."""

_CRIU_TIMEOUT_S: Final = 5.0

_SPARE_IDS: Final = IdRange(2_000_000_000, ACCOUNT_IDS)
"""To probe with where the account has none: nobody owns files there."""


@dataclass(frozen=True, slots=True)
class Features:
    """What works here."""

    ids: int
    """Ids that a nested user namespace can have: NODE_IDS, an ordinary user's range, 1, or 0
    without user namespaces."""
    overlay: bool
    """Overlay with userxattr in a user namespace, on one of the writable layers."""
    overlay_detached: bool
    """Overlay of layers on tmpfs that are attached nowhere (``lowerdir+``)."""
    writable_layer: str | None
    """What a sandbox writes to, capped: ``tmpfs``; ``ext4`` on a loop device, where tmpfs has no
    user xattrs; None where neither works."""
    fuse: bool
    squashfuse: str | None
    """The squashfuse_ll that served an image in a user namespace."""
    proc: bool
    """A new /proc and /sys can be mounted in new namespaces."""
    pidfd: bool
    seccomp: bool
    cgroup_kill: bool
    """A process is born in a v2 cgroup (CLONE_INTO_CGROUP) and killed by ``cgroup.kill``."""
    cgroup: CgroupLayout
    limits: Mapping[str, Enforcement]
    """How ``memory``, ``pids`` and ``cpu`` are held."""
    fuse_request_timeout: bool
    """``fs.fuse.default_request_timeout`` exists (since Linux 6.13)."""
    user_ids: UserIds | None = None
    """What the node of an ordinary user has; None for root's."""
    delegated: Delegated | None = None
    """The part of cgroup v2 that an ordinary user was given."""
    programs: Mapping[str, str | None] = field(default_factory=dict)
    kernel_images: bool = False
    """The kernel itself can serve images here (``image_backend = "kernel"``)."""
    security_attributes: str = "kernel"
    """Who refuses ``security.*`` attributes to a sandbox: the ``kernel``; a ``program`` of hostd's
    for its LSM bpf (``bpf_lsm``), where that lets anybody set them; ``nobody``."""
    checkpoint: str = "not looked for"
    """Why no process of a sandbox can be checkpointed here: a snapshot with ``processes`` is
    refused (``checkpoint-unsupported``)."""

    def to_json(self) -> dict[str, Any]:
        layout = self.cgroup
        return {
            **{name: getattr(self, name) for name in self.__slots__ if name not in _NOT_TOLD},
            "limits": dict(self.limits),
            "programs": dict(self.programs),
            "cgroup": {
                "v2_mount": None if layout.v2_mount is None else str(layout.v2_mount),
                "v2_controllers": sorted(layout.v2_controllers),
                "v1": {name: str(path) for name, path in sorted(layout.v1.items())},
            },
        }


_NOT_TOLD: Final = ("cgroup", "user_ids", "delegated")


def probe(
    account: str = "sandboxd",
    ids: IdRange | None = None,
    sandboxes: int = 256,
    squashfuse: Path | None = None,
    *,
    writable_layer: str = "auto",
    layers_dir: str = "/var/tmp",
    image_backend: str = "fuse",
) -> tuple[Features, list[Probe]]:
    """Try everything. Needs to run in a process with one thread.

    ``account`` is whom the daemon runs as. ``ids`` are the host ids the node's user namespace will
    have, where the configuration names them; else those of the account. ``sandboxes``: how many at
    once the host's limits should be enough for. ``squashfuse``: the program, if not the one found.
    ``writable_layer``: the one that must serve, ``auto`` for the best. ``layers_dir``: where those
    writable layers may lie that are on disk. ``image_backend``: the one that must serve.
    """
    found = Findings()
    user: UserIds | None = None
    map_ids: mounts.MapIds | None
    if os.geteuid() == 0:
        ids = _account(found, account, ids)
        base = ids.first
        count, map_ids = _user_namespaces(found, ids)
    else:
        base = 0
        user = features_user.find_ids(found)
        count, map_ids = (0, None) if user is None else (user.node_ids, user.map)
    layout = cgroup.layout()
    part = None if os.geteuid() == 0 else delegation.find(layout)
    delegated = part if isinstance(part, delegation.Delegated) else None
    features = Features(
        ids=count,
        **_mounts(
            found,
            map_ids if count else None,
            squashfuse or programs.find_program("squashfuse_ll"),
            writable_layer,
            lambda: _overlay_on_ext4(map_ids, base, layers_dir),
        ),
        pidfd=found.attempt(
            "pidfd", processes.pidfds, "signal and wait by pidfd", "use Linux 5.4 or newer"
        ),
        seccomp=found.attempt(
            "seccomp",
            processes.seccomp_filter,
            "filters load and refuse",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        ),
        cgroup_kill=(part is None or delegated is not None)
        and found.attempt(
            "cgroup kill",
            lambda: cgroups.clone_into_and_kill(layout),
            f"born in and killed through {delegated.path if delegated else layout.v2_mount}",
            "mount a cgroup2 hierarchy (mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified) on "
            "Linux 5.14 or newer, and let this process write to it",
        ),
        cgroup=layout,
        limits=_limits(found, layout) if part is None else features_user.limits(found, part),
        user_ids=user,
        delegated=delegated,
        fuse_request_timeout=_fuse_request_timeout(found),
        programs=_programs(found),
        kernel_images=_kernel_images(found, map_ids if count else None, image_backend),
        security_attributes=features_attributes.find(
            found,
            map_ids if count else None,
            IdRange(base, SANDBOX_IDS),
            SANDBOX_IDS if count == NODE_IDS else 0,
        ),
        checkpoint=_checkpoint(found),
    )
    if user is not None:
        features_user.core_dumps(found)
    _settings(found, sandboxes)
    return features, found.probes


def _account(found: Findings, account: str, ids: IdRange | None) -> IdRange:
    try:
        pwd.getpwnam(account)
    except KeyError:
        found.add(
            "account",
            Status.FAIL,
            f"there is no account {account}",
            f"useradd --system --user-group --no-create-home --shell /usr/sbin/nologin {account}",
        )
    else:
        found.add("account", Status.OK, account)
    if ids is not None:
        enough = ids.count >= NODE_IDS
        found.add(
            "id range",
            Status.OK if enough else Status.FAIL,
            f"{ids.first}-{ids.first + ids.count - 1}, from the configuration",
            f"configure a range of at least {NODE_IDS} ids",
        )
        return ids if enough else _SPARE_IDS
    uids = id_ranges.largest(id_ranges.SUBUID, account)
    gids = id_ranges.largest(id_ranges.SUBGID, account)
    smallest = min(uids.count if uids else 0, gids.count if gids else 0)
    if uids is None or uids != gids or smallest < ACCOUNT_IDS:
        last = _SPARE_IDS.first + ACCOUNT_IDS - 1
        found.add(
            "id range",
            Status.FAIL,
            f"{account} has {smallest} ids in common in /etc/subuid and /etc/subgid, "
            f"{ACCOUNT_IDS} are needed",
            f"usermod --add-subuids {_SPARE_IDS.first}-{last} "
            f"--add-subgids {_SPARE_IDS.first}-{last} {account}",
        )
        return _SPARE_IDS
    found.add("id range", Status.OK, f"{uids.first}-{uids.first + uids.count - 1} of {account}")
    return uids


def _user_namespaces(found: Findings, ids: IdRange) -> tuple[int, mounts.MapIds]:
    """How many ids work, and how to map them for the probes that follow."""
    wanted = IdRange(ids.first, NODE_IDS)

    def map_range(pid: int) -> None:
        id_ranges.map_ids(pid, wanted, wanted)

    name = "user namespaces"
    remedy = (
        "sysctl -w user.max_user_namespaces=100000; "
        "sysctl -w kernel.unprivileged_userns_clone=1 where that exists"
    )
    try:
        mounts.user_namespaces(map_range, SANDBOX_IDS)
    except (OSError, ChildError) as error:
        reason = reason_of(error)
    else:
        found.add(name, Status.OK, f"nested, {NODE_IDS} ids")
        return NODE_IDS, map_range
    try:
        mounts.user_namespaces(id_ranges.map_self_only, 1)
    except (OSError, ChildError):
        found.add(name, Status.FAIL, reason, remedy)
        return 0, map_range
    found.add(
        name,
        Status.FAIL,
        f"one id only: {reason}",
        f"{programs.remedy('newuidmap')}, and a range of ids for this account (see id range)",
    )
    return 1, id_ranges.map_self_only


def _overlay_on_ext4(map_ids: mounts.MapIds | None, owner: int, directory: str) -> None:
    if os.geteuid() != 0:
        raise OSError(1, "loop devices are root's")
    assert map_ids is not None
    mounts.overlay_on_ext4(map_ids, owner, directory)


def _mounts(
    found: Findings,
    map_ids: mounts.MapIds | None,
    squashfuse: Path | None,
    wanted_layer: str,
    overlay_on_ext4: Callable[[], None],
) -> dict[str, Any]:
    """``map_ids``: None where there are no user namespaces to try it in."""
    if map_ids is None:
        for name in ("overlay", "overlay of detached layers", "fuse", "squashfuse", "proc"):
            found.add(name, Status.FAIL, "not tried", "see user namespaces")
        return {
            "overlay": False,
            "overlay_detached": False,
            "writable_layer": None,
            "fuse": False,
            "squashfuse": None,
            "proc": False,
        }
    served = False
    writable_layer, detached = _writable_layer(found, map_ids, wanted_layer, overlay_on_ext4)
    fuse = found.attempt(
        "fuse",
        lambda: mounts.fuse(map_ids),
        "mounted in a user namespace",
        "modprobe fuse, and see that this account may open /dev/fuse",
    )
    if squashfuse is not None:
        served = found.attempt(
            "squashfuse",
            lambda: mounts.squashfuse(map_ids, squashfuse),
            f"{squashfuse} serves zstd images in a user namespace",
            f"reinstall it: {programs.remedy('squashfuse_ll')}" if fuse else "as for fuse",
        )
    proc = found.attempt(
        "proc",
        lambda: mounts.proc_visible(map_ids),
        "/proc and /sys can be mounted anew",
        "uncover /proc and /sys: unmount what lies over parts of them",
    )
    return {
        "overlay": writable_layer is not None,
        "overlay_detached": detached,
        "writable_layer": writable_layer,
        "fuse": fuse,
        "squashfuse": str(squashfuse) if served else None,
        "proc": proc,
    }


def _writable_layer(
    found: Findings, map_ids: mounts.MapIds, wanted: str, overlay_on_ext4: Callable[[], None]
) -> tuple[str | None, bool]:
    """Which one works, and whether it is stacked without being attached anywhere."""
    if wanted == "ext4":
        works = found.attempt(
            "overlay",
            overlay_on_ext4,
            "copy up, white out, make opaque, on ext4 on a loop device",
            f"see that root has loop devices here and mkfs.ext4 ({programs.remedy('mkfs.ext4')}), "
            'or set writable_layer = "auto"',
        )
        return ("ext4" if works else None), False
    done = "copy up, white out, make opaque"
    newer = "none needed: layers are attached instead (tried without on Linux 6.18)"
    try:
        mounts.overlay(map_ids, False)
    except (OSError, ChildError) as error:
        why = reason_of(error)
    else:
        found.add("overlay", Status.OK, f"{done}, on tmpfs")
        detached = found.attempt(
            "overlay of detached layers",
            lambda: mounts.overlay(map_ids, True),
            "layers by descriptor and lowerdir+",
            newer,
            Status.WARN,
        )
        return "tmpfs", detached
    if wanted == "tmpfs":
        found.add("overlay", Status.FAIL, f"not on tmpfs: {why}", 'set writable_layer = "auto"')
        return None, False
    try:
        overlay_on_ext4()
    except (OSError, ChildError) as error:
        reason = reason_of(error)
        found.add(
            "overlay",
            Status.FAIL,
            f"not on tmpfs: {why}; nor on ext4 on a loop device: {reason}",
            "use Linux 6.6 or newer, where tmpfs has user xattrs; or see that root has loop "
            f"devices here and mkfs.ext4 ({programs.remedy('mkfs.ext4')})",
        )
        return None, False
    found.add(
        "overlay",
        Status.WARN,
        f"{done}, on ext4 on a loop device; not on tmpfs: {why}",
        "none needed: sandboxes write to disk instead of memory. Linux 6.6 or newer is faster",
    )
    return "ext4", False


def _kernel_images(found: Findings, map_ids: mounts.MapIds | None, image_backend: str) -> bool:
    """Only where it is asked for is it missed."""
    name, why = "images served by the kernel", "see user namespaces"
    if map_ids is not None:
        try:
            mounts.kernel_squashfs(map_ids)
        except (OSError, ChildError) as error:
            why = reason_of(error)
        else:
            found.add(name, Status.OK, "squashfs on a loop device, idmapped")
            return True
    if image_backend != "kernel":
        found.add(name, Status.OK, f"not offered: {why}")
        return False
    remedy = (
        'see that root has loop devices here, on Linux 6.2 or newer, or set image_backend = "fuse"'
    )
    found.add(name, Status.FAIL, why, remedy)
    return False


def _limits(found: Findings, layout: CgroupLayout) -> Mapping[str, Enforcement]:
    """A limit that does not hold is a warning, and in the node's features; never left unsaid."""
    tries: dict[str, Callable[[CgroupLayout], None]] = {
        "memory": cgroups.memory_limit,
        "pids": cgroups.pids_limit,
        "cpu": cgroups.cpu_limit,
    }
    if procfs.sysctl("vm.panic_on_oom") == "2":
        # The kernel would panic on any sandbox that runs out of its memory, and on our own probe.
        found.add(
            "panic on oom",
            Status.FAIL,
            "vm.panic_on_oom is 2: a sandbox at its memory limit would end the node",
            "sysctl -w vm.panic_on_oom=0",
        )
        del tries["memory"]
    held = {}
    for controller, action in tries.items():
        version = layout.version_of(controller)
        works = found.attempt(
            f"{controller} limit",
            lambda action=action: action(layout),  # type: ignore[misc]
            f"held by cgroup v{version}",
            f"enable the cgroup controller {controller} and let this process make groups",
            Status.WARN if controller == "cpu" else Status.FAIL,
        )
        held[controller] = Enforcement.ENFORCED if works else Enforcement.NONE
    return MappingProxyType({"memory": Enforcement.NONE, **held})


def _fuse_request_timeout(found: Findings) -> bool:
    value = procfs.sysctl("fs.fuse.default_request_timeout")
    found.add(
        "fuse request timeout",
        Status.WARN if value is None else Status.OK,
        "this kernel has none" if value is None else f"fs.fuse.default_request_timeout = {value}",
        "none needed: a watchdog ends an image server that does not answer",
    )
    return value is not None


def _checkpoint(found: Findings) -> str:
    """Nothing restores a sandbox's processes: its PID 1 was never executed, so CRIU would have to
    make it anew, with sockets to a launcher that knows another. What is told is how far CRIU itself
    comes on this node."""
    program = programs.find_program("criu")
    if program is None:
        why = "no criu on this node, and sandboxes of this version cannot be restored"
    else:
        try:
            done = subprocess.run(
                [program, "check"], capture_output=True, timeout=_CRIU_TIMEOUT_S, check=False
            )
            said = (done.stdout + done.stderr).decode("utf-8", "replace").strip().splitlines()
            works = done.returncode == 0
            last = said[-1] if said else f"status {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            works, last = False, str(error)
        why = (
            "criu works here, but sandboxes of this version cannot be restored"
            if works
            else f"criu does not work here: {last}"
        )
    found.add("process checkpoints", Status.OK, f"not offered: {why}")
    return why


_NEEDED_FOR: Final[Mapping[str, tuple[Status, str]]] = MappingProxyType(
    {
        "squashfuse_ll": (Status.FAIL, "mounts images"),
        "tar2sqfs": (Status.WARN, "needed to convert images on this node"),
        "nft": (Status.WARN, "needed for sandboxes with a network"),
        "newuidmap": (Status.WARN, "needed by accounts other than root"),
        "fusermount3": (Status.WARN, "needed by accounts other than root"),
    }
)


def _programs(found: Findings) -> Mapping[str, str | None]:
    paths: dict[str, str | None] = {}
    for name, (status, purpose) in _NEEDED_FOR.items():
        path: Path | None = programs.find_program(name)
        paths[name] = None if path is None else str(path)
        if path is None:
            found.add(name, status, f"not found; {purpose}", programs.remedy(name))
        else:
            found.add(name, Status.OK, str(path))
    return MappingProxyType(paths)


def _settings(found: Findings, sandboxes: int) -> None:
    for need in settings.needs(sandboxes):
        value = "no limit" if need.value is None else str(need.value)
        detail = value if need.met else f"{value}, {need.needed} for {sandboxes} sandboxes: "
        found.add(
            need.name,
            Status.OK if need.met else Status.WARN,
            detail if need.met else detail + need.why,
            need.remedy,
        )
