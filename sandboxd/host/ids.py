"""The host ids a node uses: one range of subordinate ids of the account that sandboxd runs as.

========================  ==========================================================
offset in the range       who
========================  ==========================================================
0 … 65535                 ids 0 … 65535 of every sandbox
65536                     launcher, zygote and PID 1: in no sandbox's map
65537                     the image servers (squashfuse)
65538                     owner of the node's user namespace; not mapped in it
65539                     spare
========================  ==========================================================

An owner of its own, because whoever owns a user namespace has all capabilities in it, and because
the kernel charges what is used in it to that owner too: neither may be root or the API's account.
"""

from __future__ import annotations

import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.errors import FeatureMissing
from sandboxd.linux.id_ranges import SUBGID, SUBUID, ranges

SANDBOX_IDS: Final = 65_536
NODE_ID: Final = 65_536
FUSE_ID: Final = 65_537
MAPPED_IDS: Final = 65_538
RANGE_SIZE: Final = 65_540


@dataclass(frozen=True, slots=True)
class NodeIds:
    base: int
    api_uid: int
    api_gid: int

    @property
    def owner(self) -> int:
        """Host id that owns the node's user namespace."""
        return self.base + 65_538

    @property
    def node(self) -> int:
        """Host id of launcher, zygote and PID 1."""
        return self.base + NODE_ID

    @property
    def resolver(self) -> int:
        """Host id of the process that answers sandboxes' DNS queries."""
        return self.base + 65_539


def find_ids(account: str) -> NodeIds:
    """The ids of ``account``. Raises FeatureMissing where it or its range is not there."""
    hint = "run scripts/install, which makes the account and its range"
    try:
        entry = pwd.getpwnam(account)
    except KeyError:
        raise FeatureMissing(f"there is no account {account!r}", hint=hint) from None
    if entry.pw_uid == 0:
        raise FeatureMissing(f"account {account!r} is root", hint="choose an unprivileged account")
    common = sorted(_usable(SUBUID, account) & _usable(SUBGID, account))
    if not common:
        raise FeatureMissing(
            f"account {account!r} has no range of {RANGE_SIZE} ids in both {SUBUID} and {SUBGID}",
            hint=hint,
        )
    return NodeIds(common[0], entry.pw_uid, entry.pw_gid)


def _usable(file: Path, account: str) -> set[int]:
    return {found.first for found in ranges(file, account) if found.count >= RANGE_SIZE}
