"""What holds a sandbox's memory and processes where there are no cgroups: a look at them, again and
again, and SIGKILL for what is too much.

Whose processes: all descendants of its PID 1. It reaps every orphan of its pid namespace, and
nobody else can get into that. Nothing here asks the sandbox.

Memory. Counted are anonymous and shared pages and what lies in memfds, which may be mapped nowhere.
The kernel's cheap figures count a page that several share once for each of them: they only tell
when to ask for the dear ones (smaps_rollup, where it is divided among them). Above ``memory_mb``
the process with the most is killed, as the kernel would. What is written to files is held by the
size of the writable layer, as always. Not counted is the kernel's own memory of a sandbox (sockets,
pipes).

Processes. RLIMIT_NPROC of PID 1, which all inherit, holds each user of the sandbox to ``pids`` (the
kernel counts by user and user namespace, since Linux 5.14). Who has more by being several users is
ended as a whole (``pids-exhausted``).

What is taken and given back between two looks is not seen: the node says ``watchdog``, not
``enforced``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.launcher.loop import Loop, Task
from sandboxd.launcher.sandboxes import Sandbox
from sandboxd.launcher.watched import Watched
from sandboxd.launcher.worker import Handler, Worker
from sandboxd.linux import pidfd, procfs
from sandboxd.model import SandboxState

LOOK_TIMEOUT_S: Final = 10.0
PART_OF_A_CPU: Final = 0.1
"""The most that looking may take: with many processes looks are further apart than asked for."""
AT_ONCE: Final = 256
"""Sandboxes in one request: fits a datagram."""


@dataclass(slots=True)
class Use:
    """What a sandbox's processes have, and which has the most memory."""

    memory_bytes: int = 0
    tasks: int = 0
    largest: int = 0
    largest_bytes: int = -1


class Watchdog:
    def __init__(
        self, loop: Loop, sandboxes: Mapping[str, Sandbox], worker: Worker, every_s: float
    ) -> None:
        self._loop = loop
        self._sandboxes = sandboxes
        self._worker = worker
        self._every_s = every_s

    def keep_watch(self) -> Task[None]:
        """For ever."""
        pause_s = self._every_s
        while True:
            yield from self._loop.sleep(pause_s)
            pause_s = self._every_s
            known = [one for one in self._sandboxes.values() if _watched(one) is not None]
            for first in range(0, len(known), AT_ONCE):
                began = time.monotonic()
                try:
                    yield from self._look(known[first : first + AT_ONCE])
                except (OSError, TimeoutError) as error:
                    print(f"launcher: watchdog: {error}", file=sys.stderr)
                    self._worker.kill()
                pause_s = max(pause_s, (time.monotonic() - began) / PART_OF_A_CPU)

    def _look(self, sandboxes: list[Sandbox]) -> Task[None]:
        watched = {one.id: found for one in sandboxes if (found := _watched(one)) is not None}
        asked = [
            [name, one.pid, one.limits.memory_mb << 20 if one.limits else 0]
            for name, one in watched.items()
        ]
        reply = self._worker.request("look", sandboxes=asked)
        answer = yield from self._loop.wait(reply, LOOK_TIMEOUT_S, "a look at all processes")
        for name, memory_bytes, tasks, largest in answer.value["seen"]:
            sandbox = self._sandboxes.get(name)
            if sandbox is None or sandbox.slot is None or _watched(sandbox) is not watched[name]:
                continue  # it has ended, or was reset
            self._judge(sandbox, watched[name], Use(memory_bytes, tasks, largest))

    def _judge(self, sandbox: Sandbox, watched: Watched, use: Use) -> None:
        assert watched.limits is not None
        assert sandbox.slot is not None
        watched.memory_bytes = use.memory_bytes
        watched.memory_peak_bytes = max(watched.memory_peak_bytes or 0, use.memory_bytes)
        watched.tasks = use.tasks
        if use.tasks > watched.limits.pids:
            sandbox.reason = "pids-exhausted"
            sandbox.slot.kill()
        elif use.memory_bytes > watched.limits.memory_mb << 20:
            # Counted before it ends: whoever is told of the end looks at the count.
            watched.count_kill()
            _kill(use.largest, watched.pid)


def _watched(sandbox: Sandbox) -> Watched | None:
    if sandbox.slot is None or sandbox.state is not SandboxState.RUNNING:
        return None
    watched = sandbox.slot.cgroups.watched
    return watched if watched is not None and watched.limits is not None else None


def _kill(pid: int, pid1: int) -> None:
    """SIGKILL one of a sandbox. The pidfd comes first, then the look whose it is: the number may
    have been given away."""
    fd = pidfd.open_living(pid)
    if fd is None:
        return
    try:
        if pid in set(descendants(pid1)):
            pidfd.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


# --- in the worker -------------------------------------------------------------------------------


def handlers() -> Mapping[str, Handler]:
    def look(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        del fds
        seen = []
        for name, pid1, memory_bytes in request["sandboxes"]:
            use = measure(list(descendants(pid1)), memory_bytes)
            seen.append([name, use.memory_bytes, use.tasks, use.largest])
        return {"seen": seen}, ()

    return {"look": look}


def descendants(pid: int) -> Iterator[int]:
    """All below a process, zombies left out."""
    try:
        found = procfs.children(pid)
    except OSError:
        return  # it has ended
    for child in found:
        yield child
        yield from descendants(child)


def measure(pids: Iterable[int], limit_bytes: int) -> Use:
    """What these processes have; exactly only where it may be more than ``limit_bytes``."""
    use = Use()
    alive: list[int] = []
    memfds: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError, KeyError, ValueError):
            status = procfs.status(pid)
            use.tasks += int(status["Threads"])
            if "RssAnon" not in status:
                continue  # a zombie
            own = _memfds(pid)
            pages = sum(_kilobytes(status, name) for name in ("RssAnon", "RssShmem", "VmSwap"))
            memory_bytes = (pages << 10) + sum(own.values())
            memfds |= own
            alive.append(pid)
            use.memory_bytes += pages << 10
            if memory_bytes > use.largest_bytes:
                use.largest, use.largest_bytes = pid, memory_bytes
    use.memory_bytes += sum(memfds.values())
    if use.memory_bytes > limit_bytes:
        use.memory_bytes = _exactly(alive, sum(memfds.values()))
    return use


def _exactly(pids: Iterable[int], memfd_bytes: int) -> int:
    private = shared = 0
    for pid in pids:
        with suppress(OSError, ValueError):
            rollup = procfs.smaps_rollup(pid)
            private += _kilobytes(rollup, "Pss_Anon") + _kilobytes(rollup, "SwapPss")
            shared += _kilobytes(rollup, "Pss_Shmem")
    # What of the memfds is mapped is among the shared.
    return (private << 10) + max(shared << 10, memfd_bytes)


def _kilobytes(fields: Mapping[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0])


def _memfds(pid: int) -> dict[tuple[int, int], int]:
    """Bytes by device and inode. Only what its name says is one is asked: a file of an image might
    not answer."""
    found: dict[tuple[int, int], int] = {}
    directory = f"/proc/{pid}/fd"
    for number in _names(directory):
        with suppress(OSError):
            if os.readlink(f"{directory}/{number}").startswith("/memfd:"):
                status = os.stat(f"{directory}/{number}")
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def _names(directory: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(directory)
    return []
