"""An ordinary user's node in a delegated cgroup: made by the user, given to the node's id.

::

    delegated        the user's; its limits are the giver's
    ├── supervisor   the user's: daemon, hostd, and whatever else stood in the delegated cgroup
    └── NAME         the node's id's, its limits the user's
        ├── node     the user's: launcher and zygote, put there by hostd
        └── s1 …     the node's id's: sandboxes

Where the node has ids of a range, only a process that has both the user's id and those in its user
namespace may give the one's files to the other, or remove what both have made: a child that is
gone when it has done so. The launcher itself does not have the user's id.

Without controllers (a v2 hierarchy beside v1) it serves to kill and to freeze; nothing needs to
make room then.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from sandboxd.host.cgroups import NODE, make_room, weigh
from sandboxd.host.ids import NODE_ID
from sandboxd.launcher.cgroups import CONTROLLERS, NodeCgroups
from sandboxd.linux import cgroup, child, namespaces, user_ids
from sandboxd.linux.child import ChildError
from sandboxd.linux.delegation import GIVEN_FILES, LIMITING, Delegated
from sandboxd.linux.user_ids import UserIds

REMOVE_S: Final = 10.0
ROOM_TRIES: Final = 20
"""Others that stand in the same cgroup may start processes meanwhile."""


def make_delegated(name: str, delegated: Delegated, ids: UserIds) -> NodeCgroups:
    """Make the node's cgroups, emptied of what an earlier node left, and give them to the node's
    id. Raises OSError."""
    wanted = frozenset(CONTROLLERS) & delegated.controllers
    if not delegated.limits:
        wanted -= LIMITING
    v2 = delegated.path / name
    remove_delegated(v2, ids)
    if wanted:
        _hand_on(delegated.path, wanted)
    cgroup.make(v2)
    if wanted:
        cgroup.enable_controllers(v2, wanted)
    cgroup.make(v2 / NODE)
    made = NodeCgroups(v2, {}, wanted, watched=not delegated.limits)
    weigh(made)
    if not ids.single:
        _as_both(ids, lambda: _give(v2))
    return made


def remove_delegated(path: Path, ids: UserIds | None = None) -> None:
    """Kill whatever is in a node's cgroup and remove it; nothing if there is none. Raises OSError.

    ``ids``: the node's; of the user, as files tell, if not given.
    """
    if not path.exists():
        return
    with suppress(FileNotFoundError):
        cgroup.kill(path)
    ids = ids or user_ids.find()

    def remove() -> None:
        cgroup.remove_tree(path, time.monotonic() + REMOVE_S)

    if ids.single:
        remove()
    else:
        _as_both(ids, remove)


def _hand_on(path: Path, controllers: frozenset[str]) -> None:
    for left in reversed(range(ROOM_TRIES)):
        make_room(path)
        try:
            cgroup.enable_controllers(path, controllers)
        except OSError as error:
            if error.errno != errno.EBUSY or not left:
                raise
        else:
            return


def _give(path: Path) -> None:
    os.chown(path, NODE_ID, NODE_ID)
    for name in GIVEN_FILES:
        os.chown(path / name, NODE_ID, NODE_ID)


def _as_both(ids: UserIds, function: Callable[[], None]) -> None:
    """Call as root over the user's id and the node's ids, and over nothing else."""
    prepare = ids.with_own().map
    try:
        child.run(function, 2 * REMOVE_S, namespaces.CLONE_NEWUSER, prepare)
    except ChildError as error:
        raise OSError(errno.EIO, str(error), "a child with the ids of user and node") from error
