"""Whether the servers of a sandbox's images still live, asked before any result is believed.

A command that reads from an image whose server died sees ENOTCONN and may end with a status of
its own making: a wrong reward. Each server holds the write ends of two pipes, one at a lower and
one at a higher descriptor than its FUSE one: in whichever order the kernel closes a dying
process's descriptors, one pipe is at its end before anybody can see ENOTCONN.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence


class ImageWatch:
    """Takes the read ends over."""

    __slots__ = ("_fds", "_poll")

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)
        self._poll = select.poll()
        for fd in self._fds:
            self._poll.register(fd, 0)  # POLLHUP is always told

    def all_alive(self) -> bool:
        return not self._poll.poll(0)

    def close(self) -> None:
        for fd in self._fds:
            self._poll.unregister(fd)
            os.close(fd)
        self._fds.clear()
