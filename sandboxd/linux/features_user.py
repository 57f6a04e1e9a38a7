"""The part of the features that is another one for an ordinary user: his ids, and no cgroups."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from sandboxd.linux import procfs, user_ids
from sandboxd.linux.child import ChildError
from sandboxd.linux.findings import Findings, Status, reason_of
from sandboxd.linux.probes import mounts
from sandboxd.linux.user_ids import UserIds
from sandboxd.model import Enforcement

_FOR_A_RANGE: Final = (
    "apt-get install uidmap; usermod --add-subuids FIRST-LAST --add-subgids FIRST-LAST with "
    f"{user_ids.WHOLE} ids that nobody has. Without: commands run as root of the sandbox only, and "
    "files of other owners cannot be changed"
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


def watchdog(found: Findings) -> Mapping[str, Enforcement]:
    """An ordinary user has no cgroups."""
    remedy = "none needed; where it is, run sandboxd as root (service mode)"
    told = {
        "memory": (Enforcement.WATCHDOG, "a watchdog kills what has more than it may"),
        "pids": (Enforcement.WATCHDOG, "RLIMIT_NPROC for each user, a watchdog for all together"),
        "cpu": (Enforcement.NONE, "held by nothing; sandboxes see as many CPUs as they may use"),
    }
    for name, (_, how) in told.items():
        found.add(f"{name} limit", Status.WARN, f"no cgroups for an ordinary user: {how}", remedy)
    return MappingProxyType({name: held for name, (held, _) in told.items()})


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
