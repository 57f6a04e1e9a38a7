"""The part of the features that is another one for an ordinary user: his ids and his cgroups."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from sandboxd.linux import procfs, user_ids
from sandboxd.linux.child import ChildError
from sandboxd.linux.delegation import LIMITING, Delegated, NotDelegated
from sandboxd.linux.findings import Findings, Status, reason_of
from sandboxd.linux.probes import mounts
from sandboxd.linux.user_ids import UserIds
from sandboxd.model import Enforcement

_FOR_A_RANGE: Final = (
    "apt-get install uidmap; usermod --add-subuids FIRST-LAST --add-subgids FIRST-LAST with "
    f"{user_ids.WHOLE} ids that nobody has. Without: commands run as root of the sandbox only, and "
    "files of other owners cannot be changed"
)

_FOR_CGROUPS: Final = (
    "systemd-run --user --scope -p Delegate=yes sandboxd serve ..., or a service with Delegate=yes "
    "(its user manager needs the controllers itself: Delegate= of user@.service)"
)


def find_ids(found: Findings) -> UserIds | None:
    """The ids of an ordinary user: his range where that works, else the one he is."""
    ids = user_ids.find()
    name = "user namespaces"
    if not ids.single:
        try:
            mounts.user_namespaces(ids.map, ids.sandbox_ids)
        except (OSError, ChildError) as error:
            ids = user_ids.single(reason_of(error))
    if ids.single:
        found.add("id range", Status.WARN, f"one id only: {ids.why}", _FOR_A_RANGE)
        remedy = (
            "sysctl -w user.max_user_namespaces=100000; "
            "sysctl -w kernel.unprivileged_userns_clone=1 where that exists"
        )
        works = found.attempt(
            name, lambda: mounts.user_namespaces(ids.map, 1), "nested, one id", remedy
        )
        return ids if works else None
    first = ids.uids[0][1]
    found.add("id range", Status.OK, f"{ids.node_ids} from {first} of {user_ids.account_name()}")
    found.add(name, Status.OK, f"nested, {ids.node_ids} ids")
    return ids


def limits(found: Findings, part: Delegated | NotDelegated) -> Mapping[str, Enforcement]:
    """What holds memory, processes and CPU: cgroups that were delegated to the user, or else a
    watchdog and nothing. ``part`` is what this process was given; a node takes the same."""
    controllers = part.controllers if isinstance(part, Delegated) else frozenset()
    if isinstance(part, NotDelegated):
        why = f"no cgroups for this user ({part.why})"
    else:
        why = f"not all of {', '.join(sorted(LIMITING))} in {part.path}"
    watched = {
        "memory": "a watchdog kills what has more than it may",
        "pids": "RLIMIT_NPROC for each user, a watchdog for all together",
    }
    held = {}
    for name, how in watched.items():
        if isinstance(part, Delegated) and part.limits:
            found.add(f"{name} limit", Status.OK, f"held by cgroup v2, delegated: {part.path}")
            held[name] = Enforcement.ENFORCED
        else:
            found.add(f"{name} limit", Status.WARN, f"{why}: {how}", _FOR_CGROUPS)
            held[name] = Enforcement.WATCHDOG
    if isinstance(part, Delegated) and "cpu" in controllers:
        found.add("cpu limit", Status.OK, f"held by cgroup v2, delegated: {part.path}")
        held["cpu"] = Enforcement.ENFORCED
    else:
        why = why if isinstance(part, NotDelegated) else f"no cpu controller in {part.path}"
        how = "held by nothing; sandboxes see as many CPUs as they may use"
        found.add("cpu limit", Status.WARN, f"{why}: {how}", _FOR_CGROUPS)
        held["cpu"] = Enforcement.NONE
    return MappingProxyType(held)


def core_dumps(found: Findings) -> None:
    """A command has a limit of 1, at which the kernel starts no handler of the host's for a crash,
    in spite of 0 (core(5)). Who may have no more than 0 has one started."""
    piped = (procfs.sysctl("kernel.core_pattern") or "").startswith("|")
    if piped and not resource.getrlimit(resource.RLIMIT_CORE)[1]:
        found.add(
            "core dumps",
            Status.WARN,
            "the host's handler is started for a crash in a sandbox, and reads its memory",
            "ulimit -Hc 1, or a kernel.core_pattern without a pipe",
        )
