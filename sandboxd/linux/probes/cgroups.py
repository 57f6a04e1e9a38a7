"""Probes of cgroups: whether one can be made, entered, killed, and whether its limits hold.

They work in a group ``probe-PID`` which they make and remove. A limit is believed when it has
refused something: the memory probe ends in an OOM kill of its own child, which the kernel logs.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sandboxd.linux import _libc, cgroup, child, process
from sandboxd.linux.cgroup import CgroupLayout
from sandboxd.linux.cgroup_limits import Limits, limits_for
from sandboxd.linux.child import ChildError

TIMEOUT_S: Final = 15.0
"""What works answers in milliseconds, but not on a node that is overrun: which must start all the
same, and only a kernel that hangs is to be given up on."""
_MEMORY_LIMIT_BYTES: Final = 16 << 20
_CPU_LIMIT: Final = 0.1
_CPU_BURN_S: Final = 0.025
"""More than the shares of two periods (of 100 ms): the end of one and the start of the next may
fall into it, but then the kernel must throttle."""


def clone_into_and_kill(layout: CgroupLayout) -> None:
    """A child is born in a v2 cgroup (CLONE_INTO_CGROUP), and ends by its ``cgroup.kill``."""
    if layout.v2_mount is None:
        raise _libc.oserror(errno.ENOENT, "no cgroup2 hierarchy is mounted")
    with _group(layout, "") as path:
        fd = cgroup.open_directory(path)
        try:
            pid = process.clone3(0, signal.SIGCHLD, fd)
            if pid == 0:
                while True:
                    signal.pause()
        finally:
            os.close(fd)
        try:
            if cgroup.processes(path) != [pid]:
                raise _libc.oserror(errno.EIO, "CLONE_INTO_CGROUP placed the child elsewhere")
            cgroup.kill(path)
            if not cgroup.wait_empty(path, time.monotonic() + TIMEOUT_S):
                raise _libc.oserror(errno.ETIMEDOUT, "cgroup.kill did not end the child")
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def memory_limit(layout: CgroupLayout) -> None:
    """A child that writes to twice its limit is killed, and counted."""
    with _limited(layout, "memory") as (limits, path):
        limits.set_memory(path, _MEMORY_LIMIT_BYTES)

        def hog() -> None:
            # A service manager may have taken us out of the OOM killer's reach (OOMScoreAdjust=).
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
            cgroup.add_process(path, 0)
            with mmap.mmap(-1, 2 * _MEMORY_LIMIT_BYTES) as memory:
                for offset in range(0, len(memory), mmap.PAGESIZE):
                    memory[offset] = 1

        with contextlib.suppress(ChildError):  # it ends without an answer: that is the point
            child.run(hog, TIMEOUT_S)
        if limits.oom_kills(path) == 0:
            raise _libc.oserror(errno.EIO, "memory beyond the limit was granted")


def pids_limit(layout: CgroupLayout) -> None:
    """A child that is at its limit cannot fork."""
    with _limited(layout, "pids") as (limits, path):
        limits.set_pids(path, 1)

        def fork() -> None:
            cgroup.add_process(path, 0)
            try:
                if os.fork() == 0:
                    os._exit(0)
            except BlockingIOError:  # EAGAIN
                return
            raise _libc.oserror(errno.EIO, "a process beyond the limit was granted")

        child.run(fork, TIMEOUT_S)


def cpu_limit(layout: CgroupLayout) -> None:
    """A child that wants more than its share of a period is throttled."""
    with _limited(layout, "cpu") as (limits, path):
        limits.set_cpu(path, _CPU_LIMIT)

        def burn() -> None:
            cgroup.add_process(path, 0)
            started = time.process_time()
            while time.process_time() < started + _CPU_BURN_S:
                pass

        child.run(burn, TIMEOUT_S)
        if cgroup.read_keyed(path / "cpu.stat").get("nr_throttled", 0) == 0:
            raise _libc.oserror(errno.EIO, "run time beyond the limit was granted")


@contextlib.contextmanager
def _limited(layout: CgroupLayout, controller: str) -> Iterator[tuple[Limits, Path]]:
    limits = limits_for(layout, controller)
    if limits is None:
        raise _libc.oserror(errno.ENOENT, f"no cgroup hierarchy has the {controller} controller")
    with _group(layout, controller) as path:
        yield limits, path


@contextlib.contextmanager
def _group(layout: CgroupLayout, controller: str) -> Iterator[Path]:
    """A new cgroup with ``controller`` ("" needs none but v2), removed at the end."""
    path = _make_somewhere(layout, controller)
    restore = None
    try:
        if controller and layout.version_of(controller) == 2:
            restore = _hand_on(path.parent, controller)
        yield path
    finally:
        cgroup.remove_tree(path, time.monotonic() + TIMEOUT_S)
        if restore is not None:
            cgroup.write(restore, f"-{controller}")


def _make_somewhere(layout: CgroupLayout, controller: str) -> Path:
    """At the top of the hierarchy; where that is not ours, below our own group (delegated)."""
    top = layout.mount_of(controller) if controller else layout.v2_mount
    on_v1 = bool(controller) and layout.version_of(controller) == 1
    own = layout.own.get(controller if on_v1 else "")
    refusal: OSError | None = None
    for parent in (top, own):
        if parent is None:
            continue
        path = parent / f"probe-{os.getpid()}"
        try:
            cgroup.make(path)
        except OSError as error:
            refusal = refusal or error
        else:
            return path
    raise refusal or _libc.oserror(errno.ENOENT, "no place for a cgroup")


def _hand_on(parent: Path, controller: str) -> Path | None:
    """Enable ``controller`` for the children of ``parent``; the file to take it back in, if so."""
    file = parent / "cgroup.subtree_control"
    if controller in file.read_text(encoding="ascii").split():
        return None
    cgroup.write(file, f"+{controller}")
    return file
