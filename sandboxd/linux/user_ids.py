"""The ids that an ordinary user can have in a user namespace of his own.

``range``   65,536 or more subordinate ids, subuid(5), mapped by newuidmap(1), which is setuid root
``single``  his own id alone, as id 0: no other user, no change of owner; anybody may have that

What the node's user namespace has (``host/ids.py`` says what each is for)::

    inside        range of 65,538    of 65,536      single
    0 … 65532     first …            first …        (0: the user)
    65533         …                  -
    65534         …                  first+65533
    65535         …                  -
    65536, 65537  …                  first+65534 …

65,536 is what useradd(8) gives, and two are the node's own: a sandbox then lacks the ids 65533 and
65535, which nothing is known to use; 65534 is ``nobody``.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.linux import _libc, namespaces, programs
from sandboxd.linux.id_ranges import SUBGID, SUBUID, ranges

WHOLE: Final = 65_538
LEAST: Final = 65_536
_HOLE: Final = 65_533
_NOBODY: Final = 65_534
_NODE: Final = 65_536
_MAPPER_TIMEOUT_S: Final = 5.0

Extents = tuple[tuple[int, int, int], ...]
"""(first id inside, first id outside, count), as in user_namespaces(7)."""


@dataclass(frozen=True, slots=True)
class UserIds:
    """``why``: why there is no range, where there is none."""

    uids: Extents
    gids: Extents
    why: str = ""

    @property
    def single(self) -> bool:
        return bool(self.why)

    @property
    def sandbox_ids(self) -> int:
        """A sandbox's map is ``0 0 sandbox_ids`` …"""
        if self.single:
            return 1
        return min(LEAST, self.uids[0][2], self.gids[0][2])

    @property
    def sandbox_last_id(self) -> int:
        """… and this one, if it is not 0."""
        return _NOBODY if not self.single and self.sandbox_ids < LEAST else 0

    @property
    def node_ids(self) -> int:
        """How many ids the node's user namespace has."""
        return sum(count for _, _, count in self.uids)

    def with_own(self) -> UserIds:
        """The range and, after it, the user's own id: newuidmap(1) lets anybody have that."""
        return UserIds(
            (*self.uids, (WHOLE, os.geteuid(), 1)), (*self.gids, (WHOLE, os.getegid(), 1))
        )

    def map(self, pid: int) -> None:
        """Write the maps of the user namespace that ``pid`` has made. Raises OSError."""
        if self.single:
            namespaces.write_id_map(pid, self.uids, self.gids, setgroups=False)
            return
        for name, extents in (("newuidmap", self.uids), ("newgidmap", self.gids)):
            _run_mapper(name, pid, extents)


def single(why: str) -> UserIds:
    return UserIds(((0, os.geteuid(), 1),), ((0, os.getegid(), 1),), why)


def find(subuid: Path = SUBUID, subgid: Path = SUBGID) -> UserIds:
    """What this process's user has, as far as files tell: a range where there is one."""
    account = account_name()
    uids, gids = _best(subuid, account), _best(subgid, account)
    if uids is None or gids is None:
        files = " and ".join(
            str(file) for file, found in ((subuid, uids), (subgid, gids)) if found is None
        )
        return single(f"{account} has no range of {LEAST} ids in {files}")
    for name in ("newuidmap", "newgidmap"):
        if programs.find_program(name) is None:
            return single(f"there is no {name} here")
    if (len(uids) == 1) != (len(gids) == 1):
        # Both kinds of id must have the same holes.
        uids, gids = (_extents(one[0][1], LEAST) for one in (uids, gids))
    return UserIds(uids, gids)


def account_name() -> str:
    """Of this process's user; his number where he has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _best(file: Path, account: str) -> Extents | None:
    found = max(ranges(file, account), key=lambda one: one.count, default=None)
    if found is None or found.count < LEAST:
        return None
    return _extents(found.first, found.count)


def _extents(first: int, count: int) -> Extents:
    if count >= WHOLE:
        return ((0, first, WHOLE),)
    return ((0, first, _HOLE), (_NOBODY, first + _HOLE, 1), (_NODE, first + _HOLE + 1, 2))


def _run_mapper(name: str, pid: int, extents: Sequence[tuple[int, int, int]]) -> None:
    program = programs.find_program(name)
    if program is None:
        raise FileNotFoundError(2, os.strerror(2), name)
    numbers = [str(number) for extent in extents for number in extent]
    done = subprocess.run(
        [program, str(pid), *numbers],
        capture_output=True,
        text=True,
        check=False,
        timeout=_MAPPER_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise _libc.oserror(1, f"{name}: {done.stderr.strip()}")
