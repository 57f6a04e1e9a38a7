"""Pausing a sandbox: the cgroups of its execs frozen, its PID 1 left alive.

So a paused sandbox still reads and writes files, is adopted by a restarted daemon and dies when it
is deleted (SIGKILL ends frozen processes, cgroups(7)). The daemon starts no exec while it is
paused; what it had sent before is cloned before the freeze is asked for (it waits for an M_PING).

A process in uninterruptible sleep is frozen only once that ends.

Without cgroups nothing is frozen: what needs it works only while no process but PID 1 lives.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from sandboxd.errors import FreezeUnsupported, ProcessesStuck
from sandboxd.launcher.cgroups import SandboxCgroups
from sandboxd.launcher.loop import Loop, Task
from sandboxd.linux import cgroup, procfs

FREEZE_TIMEOUT_S: Final = 5.0


def freeze(loop: Loop, cgroups: SandboxCgroups) -> Task[int]:
    """Freeze every exec; returns how many cgroups that were.

    Raises ProcessesStuck, with everything thawed again, where one cannot be frozen in time;
    FreezeUnsupported where there are no cgroups, and processes.
    """
    if cgroups.v2 is None:
        assert cgroups.watched is not None
        with suppress(OSError):  # it has ended
            if procfs.children(cgroups.watched.pid):
                raise FreezeUnsupported(
                    "processes of the sandbox are alive, and this node has no cgroups to freeze "
                    "them with",
                    hint="end them first, or use a node that has cgroups (service mode, Delegate=)",
                )
        return 0
    deadline = time.monotonic() + FREEZE_TIMEOUT_S
    pause_s = 0.0005
    while True:
        execs = exec_cgroups(cgroups)
        for path in execs:
            with suppress(FileNotFoundError):
                cgroup.write(path / "cgroup.freeze", 1)
        if all(_is_frozen(path) for path in execs):
            return len(execs)
        if time.monotonic() > deadline:
            thaw(cgroups)
            raise ProcessesStuck("a process of the sandbox cannot be frozen now")
        yield from loop.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def thaw(cgroups: SandboxCgroups) -> None:
    """Let every exec go on. Idempotent."""
    for path in exec_cgroups(cgroups):
        with suppress(FileNotFoundError):
            cgroup.write(path / "cgroup.freeze", 0)


def exec_cgroups(cgroups: SandboxCgroups) -> list[Path]:
    """The directories that PID 1 made for its execs."""
    if cgroups.v2 is None:
        return []
    with suppress(FileNotFoundError), os.scandir(cgroups.v2) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _is_frozen(path: Path) -> bool:
    with suppress(OSError):  # gone since: its last process has ended
        return cgroup.read_keyed(path / "cgroup.events").get("frozen", 1) == 1
    return True
