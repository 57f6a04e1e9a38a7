"""hostd as an ordinary user: the same node, made of what its user may do himself.

What root does elsewhere, and what takes its place:

===================  ===============================================================================
id maps              newuidmap and newgidmap, or one id (``linux/user_ids.py``). The user owns the
                     node's user namespace; launcher, PID 1 and sandboxes are other ids than his
                     where he has a range
cgroups              a part of v2 that was delegated to the user (``host/delegation.py``); what no
                     controller holds there a watchdog does (``launcher/watchdog.py``). Without such
                     a part PID 1 tells its execs apart by a mark (``init/mark.c``)
/dev/fuse            must be open to the user (0666, as udev makes it)
network, mounts of   refused by name
the host's files
===================  ===============================================================================

Namespaces of the launcher are opened while it is still its user's, and kept: of a process that is
not dumpable only root may open them later.

Nothing outlives the daemon.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from sandboxd.errors import FeatureMissing, NodeError
from sandboxd.host.delegation import make_delegated, remove_delegated
from sandboxd.host.ids import FUSE_ID, NODE_ID, NodeIds
from sandboxd.host.node import Node, NodeSettings
from sandboxd.init.protocol import close_fds
from sandboxd.launcher import protocol
from sandboxd.launcher.cgroups import NodeCgroups
from sandboxd.linux import namespaces
from sandboxd.linux.delegation import Delegated
from sandboxd.linux.user_ids import UserIds

MOUNT_DIR: Final = "/tmp"
"""Where the launcher mounts, in its own mount namespace. Not below the runtime directory: that is
closed to all but the user, and the launcher is another id."""
NO_NETWORK: Final = "sandboxes of an ordinary user have a loopback only: a router needs root"
NO_MOUNTS: Final = "an ordinary user's node mounts no files of the host: that needs root"
OOM_SCORE_MAX: Final = 500
"""What PID 1 gives to commands (``init/exec.c``); a score cannot be lowered without root."""


@dataclass(frozen=True, slots=True)
class Rootless:
    """What such a node needs beside its settings."""

    ids: UserIds
    watchdog_s: float
    delegated: Delegated | None = None


def node_ids() -> NodeIds:
    """For the parts that ask for an account's: there is no other than this user."""
    return NodeIds(0, os.geteuid(), os.getegid())


def check_oom_score() -> None:
    """Raises FeatureMissing where commands could not be made the OOM killer's choice."""
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        score = int(file.read())
    if score > OOM_SCORE_MAX:
        raise FeatureMissing(
            f"oom_score_adj is {score}, above the {OOM_SCORE_MAX} that commands are given",
            hint="start it with a lower one (choom, OOMScoreAdjust=)",
        )


class RootlessNode(Node):
    def __init__(self, settings: NodeSettings, listener: socket.socket, rootless: Rootless) -> None:
        super().__init__(settings, listener)
        self._rootless = rootless
        self._opened: dict[str, int] = {}

    def _make_cgroups(self) -> NodeCgroups | None:
        delegated = self._rootless.delegated
        if delegated is None:
            return None
        try:
            return make_delegated(self._settings.cgroup_name, delegated, self._rootless.ids)
        except OSError as error:
            raise NodeError(
                f"the cgroup that was delegated to this user cannot be used: {error}",
                hint="start it in one that is not the user's: a watchdog serves there",
            ) from error

    def _remove_cgroups(self, groups: NodeCgroups) -> None:
        assert groups.v2 is not None
        remove_delegated(groups.v2, self._rootless.ids)

    def _map_ids(self) -> None:
        names: tuple[Literal["user", "mnt"], ...] = ("user", "mnt")
        for name in names:
            self._opened[name] = namespaces.open_namespace(self._launcher_pid, name)
        self._rootless.ids.map(self._launcher_pid)

    def _namespace(self, name: Literal["user", "mnt"]) -> int:
        return os.dup(self._opened[name])

    def _orders(self) -> dict[str, Any]:
        ids, groups = self._rootless.ids, self._cgroups
        orders = super()._orders()
        return {
            **orders,
            "owner": None,
            "node_id": 0 if ids.single else NODE_ID,
            "fuse_id": 0 if ids.single else FUSE_ID,
            "sandbox_ids": ids.sandbox_ids,
            "sandbox_last_id": ids.sandbox_last_id,
            "mount_dir": MOUNT_DIR,
            # A watchdog sets PID 1's hard limit of processes, once: a root ahead of need would fix
            # it.
            "slots_primed": 0 if groups is None or groups.watched else orders["slots_primed"],
            "watchdog_s": self._rootless.watchdog_s,
        }

    def _obey(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        refusal = {
            "network": (errno.EOPNOTSUPP, NO_NETWORK),
            "netns": (errno.EOPNOTSUPP, NO_NETWORK),
            "mount": (errno.EACCES, NO_MOUNTS),
        }.get(str(message.get("verb")))
        if refusal is None:
            super()._obey(message, fds)
            return
        number, what = refusal
        protocol.send(self.sock, {"id": message["id"], "errno": number, "what": what})

    def stop(self) -> None:
        super().stop()
        opened, self._opened = self._opened, {}
        with suppress(OSError):
            close_fds(list(opened.values()))
