"""How often the kernel has killed for memory in a sandbox: one number in a cgroup file.

The file is ``memory.events`` on cgroup v2 and ``memory.oom_control`` on v1; both have a line
``oom_kill N``. It is opened once: an exec reads it twice, by pread(2). Without cgroups it is a
descriptor of the launcher's, to which its watchdog writes the same line.
"""

from __future__ import annotations

import os


class OomCounter:
    """Counts from an open fd; with ``path`` "" (no cgroup), or once the cgroup is gone, it stands
    still."""

    __slots__ = ("_fd", "_last")

    def __init__(self, path: str, fd: int = -1) -> None:
        self._last = 0
        self._fd = fd
        if path:
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._fd = -1

    def read(self) -> int:
        if self._fd < 0:
            return self._last
        try:
            text = os.pread(self._fd, 4096, 0)
        except OSError:  # ENODEV: the cgroup was removed
            return self._last
        # The line starts the file or follows a newline: "oom_kill_disable" and v2's
        # "oom_group_kill" must not be taken for it.
        at = text.find(b"oom_kill ")
        while at > 0 and text[at - 1] != 0x0A:
            at = text.find(b"oom_kill ", at + 1)
        if at >= 0:
            digits = text[at + 9 :].split(b"\n", 1)[0]
            if digits.isdigit():
                self._last = int(digits)
        return self._last

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
