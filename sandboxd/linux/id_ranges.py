"""Subordinate ids of an account, subuid(5) and subgid(5)."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.linux import _libc, namespaces, programs

SUBUID: Final = Path("/etc/subuid")
SUBGID: Final = Path("/etc/subgid")


@dataclass(frozen=True, slots=True)
class IdRange:
    """``count`` ids from ``first`` on."""

    first: int
    count: int


def ranges(file: Path, account: str) -> list[IdRange]:
    """The ranges of ``account`` (by name or by uid) in a file like /etc/subuid."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    names = {account}
    with contextlib.suppress(KeyError):
        names.add(str(pwd.getpwnam(account).pw_uid))
    entries = [line.split(":") for line in lines]
    return [
        IdRange(int(entry[1]), int(entry[2]))
        for entry in entries
        if len(entry) == 3 and entry[0] in names and entry[1].isdigit() and entry[2].isdigit()
    ]


def largest(file: Path, account: str) -> IdRange | None:
    return max(ranges(file, account), key=lambda found: found.count, default=None)


def map_ids(pid: int, uids: IdRange, gids: IdRange) -> None:
    """Map ids 0.. of the user namespace of ``pid`` to ``uids`` and ``gids``.

    By writing the maps, where this process may (CAP_SETUID in the parent namespace), else by
    newuidmap(1), which looks into /etc/subuid for us.
    """
    try:
        namespaces.write_id_map(pid, [(0, uids.first, uids.count)], [(0, gids.first, gids.count)])
    except PermissionError:
        for name, ids in (("newuidmap", uids), ("newgidmap", gids)):
            _run_mapper(name, pid, ids)


def map_self_only(pid: int) -> None:
    """Map id 0 to this process's own ids: all that an account without ranges may do."""
    namespaces.write_id_map(
        pid, [(0, os.geteuid(), 1)], [(0, os.getegid(), 1)], setgroups=os.geteuid() == 0
    )


def _run_mapper(name: str, pid: int, ids: IdRange) -> None:
    program = programs.find_program(name)
    if program is None:
        raise FileNotFoundError(2, os.strerror(2), name)
    done = subprocess.run(
        [program, str(pid), "0", str(ids.first), str(ids.count)],
        capture_output=True,
        text=True,
        check=False,
        timeout=5,
    )
    if done.returncode != 0:
        raise _libc.oserror(1, f"{name}: {done.stderr.strip()}")
