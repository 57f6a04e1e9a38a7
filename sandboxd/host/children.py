"""Children of hostd that wait where it must not: for a file system or a disk that may never answer.

Each answers the launcher itself, over hostd's socket, where a message is whole whoever sends it.
"""

from __future__ import annotations

import os
from typing import Final, Generic, TypeVar

from sandboxd.linux.pidfd import kill_within

END_S: Final = 1.0

About = TypeVar("About")


class Children(Generic[About]):
    """At most ``most`` at once, and what hostd wants to know about each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._children: dict[int, tuple[int, About]] = {}

    @property
    def pidfds(self) -> list[int]:
        """Readable once one has ended; then it is for ``ended``."""
        return list(self._children)

    @property
    def is_full(self) -> bool:
        return len(self._children) >= self._most

    def fork(self, about: About) -> bool:
        """Whether this is the child, which ends by os._exit."""
        pid = os.fork()
        if pid:
            self._children[os.pidfd_open(pid)] = (pid, about)
        return not pid

    def ended(self, pidfd: int) -> tuple[About, int]:
        """What it was about, and its wait status."""
        pid, about = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        return about, status

    def stop(self) -> None:
        """End them all. Idempotent."""
        for pidfd in self.pidfds:
            if kill_within(pidfd, END_S):
                self.ended(pidfd)
            else:  # it is held up; whoever is its parent then sees its end
                os.close(pidfd)
                del self._children[pidfd]
