"""The part of cgroup v2 that an ordinary user was given (delegated), cgroups(7): where it is.

It is given by ownership: of the cgroup's directory, its ``cgroup.procs`` and its
``cgroup.subtree_control``. Who does that:

systemd     a service or scope with ``Delegate=``, of the system with ``User=`` or of the user's own
            manager. A unit without it may be the user's too, and still is the manager's to write
            to: only what has the mark of a delegated one is taken
an admin    chown, of a cgroup of any other name
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.linux import cgroup
from sandboxd.linux.cgroup import CgroupLayout

SUPERVISOR: Final = "supervisor"
"""Where a v2 node keeps what stood in the delegated cgroup itself: it may hold no process once its
controllers are handed on."""

LIMITING: Final = frozenset({"memory", "pids"})
"""Only together do they take the place of a watchdog."""

GIVEN_FILES: Final = ("cgroup.procs", "cgroup.subtree_control", "cgroup.threads")
"""What is given with the directory, and makes the new owner the one who hands controllers on and
moves processes. The limits themselves stay the giver's."""

_UNITS: Final = (".service", ".scope", ".slice")
_MARK: Final = "user.delegate"


@dataclass(frozen=True, slots=True)
class Delegated:
    """``controllers``: those that can be handed on to the cgroups below ``path``."""

    path: Path
    controllers: frozenset[str]

    @property
    def limits(self) -> bool:
        """Memory and processes can be limited."""
        return self.controllers >= LIMITING


@dataclass(frozen=True, slots=True)
class NotDelegated:
    why: str


def own_cgroup(own: Path) -> Path:
    """The cgroup that was given to whoever started us: what an earlier node moved out of its way
    (a shell it was started from) is below that."""
    return own.parent if own.name == SUPERVISOR else own


def find(layout: CgroupLayout | None = None) -> Delegated | NotDelegated:
    """What this process's user has of its cgroup. Nothing is changed."""
    layout = layout or cgroup.layout()
    own = layout.own.get("")
    if own is None:
        return NotDelegated("no cgroup2 hierarchy is in sight")
    own = own_cgroup(own)
    needed = [own, *(own / name for name in ("cgroup.procs", "cgroup.subtree_control"))]
    if not all(os.access(path, os.W_OK) for path in needed):
        return NotDelegated(f"{own} is not this user's")
    if own.name.endswith(_UNITS) and not _is_marked(own):
        return NotDelegated(f"{own} is systemd's own: its unit has no Delegate=")
    with suppress(FileNotFoundError):  # the hierarchy's root has none
        if (own / "cgroup.type").read_text(encoding="ascii").strip() != "domain":
            return NotDelegated(f"{own} is for threads")
    controllers = (own / "cgroup.controllers").read_text(encoding="ascii").split()
    return Delegated(own, frozenset(controllers))


def _is_marked(path: Path) -> bool:
    with suppress(OSError):
        return os.getxattr(path, _MARK) == b"1"
    return False
