"""What holds a sandbox's memory and processes where no cgroup does: a look at them, again and
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
kernel counts by user and user namespace, since Linux 5.14). Who has more by being several users,
and not for a moment, is ended as a whole (``pids-exhausted``).

What is taken and given back between two looks is not seen: the node says ``watchdog``, not
``enforced``.

A sandbox can make a look at itself dear. It cannot keep the others from being looked at: what is
done for one is bounded, and a request ends after a while with those that were seen.
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

LOOK_TIMEOUT_S: Final = 20.0
REQUEST_S: Final = 1.0
"""After which a request is answered, with one sandbox at least."""
EXACT_S: Final = 0.5
"""For the dear figures of one sandbox. What is not asked by then counts in full: it takes dozens of
processes that share gigabytes."""
TASKS_SLACK: Final = 8
"""Above ``pids``: the kernel lets each user have one more that comes from outside, and file
operations are processes too, for a moment."""
TASKS_LOOKS: Final = 3
"""In a row that find more."""
FDS_MAX: Final = 4096
"""Of one sandbox that are looked at for memfds."""
PART_OF_A_CPU: Final = 0.1
"""What looking may take: with many processes looks are further apart than asked for …"""
PAUSE_MAX_S: Final = 2.0
"""… but not more than that."""
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
            known = [one for one in self._sandboxes.values() if _watched(one) is not None]
            began = time.monotonic()
            while known:
                try:
                    seen = yield from self._look(known[:AT_ONCE])
                except (OSError, TimeoutError) as error:
                    print(f"launcher: watchdog: {error}", file=sys.stderr)
                    self._worker.kill()
                    seen = 1  # it may be the one that it died of
                known = known[seen:]
            spent_s = time.monotonic() - began
            pause_s = max(self._every_s, min(PAUSE_MAX_S, spent_s / PART_OF_A_CPU))

    def _look(self, sandboxes: list[Sandbox]) -> Task[int]:
        """Look at the first of these; at how many is returned, one at least."""
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
        # One that has ended since is not asked about, and so not among the seen.
        return max(1, len(answer.value["seen"]) + len(sandboxes) - len(asked))

    def _judge(self, sandbox: Sandbox, watched: Watched, use: Use) -> None:
        assert watched.limits is not None
        assert sandbox.slot is not None
        watched.memory_bytes = use.memory_bytes
        watched.memory_peak_bytes = max(watched.memory_peak_bytes or 0, use.memory_bytes)
        watched.tasks = use.tasks
        above = use.tasks > watched.limits.pids + TASKS_SLACK
        watched.looks_above = watched.looks_above + 1 if above else 0
        if watched.looks_above >= TASKS_LOOKS:
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
        if _is_below(pid, pid1):
            pidfd.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        pass  # it has ended
    finally:
        os.close(fd)


def _is_below(pid: int, pid1: int) -> bool:
    while pid > 1:
        pid = procfs.stat(pid).parent_pid
        if pid == pid1:
            return True
    return False


# --- in the worker -------------------------------------------------------------------------------


def handlers() -> Mapping[str, Handler]:
    def look(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        del fds
        seen: list[list[Any]] = []
        deadline = time.monotonic() + REQUEST_S
        for name, pid1, memory_bytes in request["sandboxes"]:
            use = measure(list(descendants(pid1)), memory_bytes)
            seen.append([name, use.memory_bytes, use.tasks, use.largest])
            if time.monotonic() > deadline:
                break
        return {"seen": seen}, ()

    return {"look": look}


def descendants(pid: int) -> Iterator[int]:
    """All below a process, in no order. Not by recursion: a sandbox decides how deep it goes."""
    parents, known = [pid], {pid}
    while parents:
        with suppress(OSError):  # it has ended
            # One whose parent ends meanwhile is met again.
            found = [one for one in procfs.children(parents.pop()) if one not in known]
            known.update(found)
            parents += found
            yield from found


def measure(pids: Iterable[int], limit_bytes: int) -> Use:
    """What these processes have; exactly only where it may be more than ``limit_bytes``."""
    use = Use()
    alive: dict[int, int] = {}
    memfds: dict[tuple[int, int], int] = {}
    fds_left = FDS_MAX
    for pid in pids:
        with suppress(OSError, KeyError, ValueError):
            status = procfs.status(pid)
            use.tasks += int(status["Threads"])
            if "RssAnon" not in status:
                continue  # a zombie
            own, looked_at = _memfds(pid, fds_left)
            fds_left -= looked_at
            pages = sum(_kilobytes(status, name) for name in ("RssAnon", "RssShmem", "VmSwap"))
            memory_bytes = (pages << 10) + sum(own.values())
            memfds |= own
            alive[pid] = pages << 10
            use.memory_bytes += pages << 10
            if memory_bytes > use.largest_bytes:
                use.largest, use.largest_bytes = pid, memory_bytes
    use.memory_bytes += sum(memfds.values())
    if use.memory_bytes > limit_bytes:
        use.memory_bytes = _exactly(alive, sum(memfds.values()))
    return use


def _exactly(cheap: Mapping[int, int], memfd_bytes: int) -> int:
    """``cheap``: bytes by pid."""
    private = shared = unasked_bytes = 0
    deadline = time.monotonic() + EXACT_S
    for pid, memory_bytes in cheap.items():
        if time.monotonic() > deadline:
            unasked_bytes += memory_bytes
            continue
        with suppress(OSError, ValueError):
            rollup = procfs.smaps_rollup(pid)
            private += _kilobytes(rollup, "Pss_Anon") + _kilobytes(rollup, "SwapPss")
            shared += _kilobytes(rollup, "Pss_Shmem")
    # What of the memfds is mapped is among the shared.
    return (private << 10) + max(shared << 10, memfd_bytes) + unasked_bytes


def _kilobytes(fields: Mapping[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0])


def _memfds(pid: int, most: int) -> tuple[dict[tuple[int, int], int], int]:
    """Bytes by device and inode, and at how many descriptors was looked, ``most`` of them. Only
    what its name says is one is asked: a file of an image might not answer."""
    found: dict[tuple[int, int], int] = {}
    directory = f"/proc/{pid}/fd"
    names = _names(directory)[:most] if most > 0 else []
    for number in names:
        with suppress(OSError):
            if os.readlink(f"{directory}/{number}").startswith("/memfd:"):
                status = os.stat(f"{directory}/{number}")
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found, len(names)


def _names(directory: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(directory)
    return []
