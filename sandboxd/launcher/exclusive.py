"""One command has a sandbox to itself: all other processes are killed, or frozen until it ends.

Every process of a sandbox but PID 1 is in the cgroup of the exec or file operation that it descends
from, whatever sessions and parents it has left (``clone3`` puts the first one there, and no sandbox
can move one): so what is in none but the command's own is neither missed nor hit.

Order of ``begin``, and why:
  1. nothing else is started from here on, neither by the daemon nor by the launcher;
  2. PID 1 answers a ping, on the daemon's socket (before this is asked for) and on the launcher's:
     what was sent before is cloned by then and has its cgroup;
  3. each of those cgroups is killed, or frozen. Both miss no process that is forked meanwhile;
  4. killed: none of them is populated any more, and PID 1 has reaped what it inherited, or the
     command would find the process limit still used up.

``end`` kills what the command has left behind, then lets the frozen go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sandboxd.errors import FreezeUnsupported, ProcessesStuck, SandboxdError, SandboxLost
from sandboxd.launcher import freeze, usage
from sandboxd.launcher.cgroups import SandboxCgroups
from sandboxd.launcher.loop import Loop, Task
from sandboxd.launcher.sandboxes import Sandbox
from sandboxd.linux import cgroup

KILL_TIMEOUT_S: Final = 30.0
"""As for the end of one command: a process that a stopped image server holds up is freed when the
watch kills that server."""
REAP_TIMEOUT_S: Final = 10.0


def begin(loop: Loop, sandbox: Sandbox, how: str) -> Task[int]:
    """Kill or freeze (``how``) all that runs; returns in how many cgroups that was.

    To be run by ``Sandboxes.change``. Raises ProcessesStuck, with all thawed again, SandboxLost,
    FreezeUnsupported.
    """
    slot = sandbox.slot
    assert slot is not None
    if slot.cgroups.v2 is None:
        raise FreezeUnsupported("this node has no cgroups, without which no command is exclusive")
    sandbox.exclusive = True
    try:
        try:
            yield from slot.pid1.check(slot.pid1.ping(), "ping")
        except (OSError, TimeoutError) as error:
            raise SandboxLost("the sandbox's PID 1 does not answer") from error
        if how == "freeze":
            return (yield from freeze.freeze(loop, slot.cgroups))
        execs = freeze.exec_cgroups(slot.cgroups)
        yield from _kill(loop, execs)
        yield from _reaped(loop, slot.cgroups)
    except BaseException:
        sandbox.exclusive = False
        raise
    return len(execs)


def end(loop: Loop, sandbox: Sandbox) -> Task[int]:
    """Kill what is not frozen, let go on what is. Idempotent.

    Raises ProcessesStuck where something cannot be killed; the others go on all the same.
    """
    if sandbox.changing is not None:  # a beginning that nobody waits for any more
        with suppress(OSError, TimeoutError, SandboxdError):
            yield sandbox.changing
    if sandbox.slot is None or not sandbox.exclusive:
        return 0
    cgroups = sandbox.slot.cgroups
    left = [path for path in freeze.exec_cgroups(cgroups) if not _is_to_be_frozen(path)]
    try:
        yield from _kill(loop, left)
    finally:
        freeze.thaw(cgroups)
        sandbox.exclusive = False
    return len(left)


def _kill(loop: Loop, paths: Iterable[Path]) -> Task[None]:
    """SIGKILL all that is in these cgroups; returns when nothing is."""
    for path in paths:
        with suppress(OSError):  # it has ended and is removed
            cgroup.kill(path)
    yield from _until(
        loop, lambda: not any(_populated(path) for path in paths), KILL_TIMEOUT_S, "killed"
    )


def _reaped(loop: Loop, cgroups: SandboxCgroups) -> Task[None]:
    def reaped() -> bool:
        # None where nothing counts them: then nothing limits them either.
        return not usage.pids(cgroups)

    yield from _until(loop, reaped, REAP_TIMEOUT_S, "reaped")


def _until(loop: Loop, done: Callable[[], bool], within_s: float, what: str) -> Task[Any]:
    deadline = time.monotonic() + within_s
    pause_s = 0.0005
    while not done():
        if time.monotonic() > deadline:
            raise ProcessesStuck(f"a process of the sandbox cannot be {what} now")
        yield from loop.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.02)


def _populated(path: Path) -> bool:
    with suppress(OSError):
        return cgroup.read_keyed(path / "cgroup.events").get("populated", 0) == 1
    return False


def _is_to_be_frozen(path: Path) -> bool:
    with suppress(OSError):
        return (path / "cgroup.freeze").read_text(encoding="ascii").strip() == "1"
    return True  # gone meanwhile
