"""hostd's loop: a node, another one when a part of it dies, and a sweep from time to time."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from sdnotify import SystemdNotifier

from sandboxd.errors import NodeError
from sandboxd.guard import Guard
from sandboxd.host import node_lock, sweep
from sandboxd.host.node import Node, NodeSettings
from sandboxd.linux.process import raise_limit

BUSY_S: Final = 120.0
"""Longer than a start, an end or a sweep, each of which waits for others."""
RESTART_PAUSE_S: Final = 1.0
NOFILE: Final = 1_048_576


def listen(settings: NodeSettings) -> socket.socket:
    """The socket daemons connect to: only the API's account and root may."""
    path = f"{settings.runtime_dir}/launcher.sock"
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(old)
    os.chown(path, settings.ids.api_uid, settings.ids.api_gid)
    node_lock.make_api_lock(settings.runtime_dir, settings.ids.api_uid, settings.ids.api_gid)
    listener.listen(16)
    return listener


MakeNode = Callable[[NodeSettings, socket.socket], Node]


def run(
    settings: NodeSettings,
    lifeline: int | None,
    ready_fd: int | None,
    make: MakeNode = Node,
) -> None:
    """Serve until SIGTERM or SIGINT, or until ``lifeline`` (a pipe's read end) is at its end.

    One byte is written to ``ready_fd`` when the node first serves, and the fd closed; a service
    manager is told too (sd_notify(3)).
    """
    tell = SystemdNotifier().notify
    os.chmod(settings.runtime_dir, 0o755 if os.geteuid() == 0 else 0o700)
    # Hard limits cap the sum over all sandboxes, which cannot be raised once root is given up.
    raise_limit(resource.RLIMIT_NOFILE, NOFILE)
    for which in (resource.RLIMIT_NPROC, resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE):
        raise_limit(which, resource.RLIM_INFINITY)
    # 1, not 0: a piped core-dump helper of the host starts in spite of 0 (core(5)). Set here and
    # inherited by all: a sandbox's root can signal a child of PID 1 before that sets it itself.
    if resource.getrlimit(resource.RLIMIT_CORE)[1]:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(stop_write)
    # Beside a daemon of our own that is the daemon's business, which has answers to give before:
    # Slurm sends SIGTERM to all processes of a job.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, (lambda *_: None) if lifeline is None else signal.SIG_IGN)
    guard = Guard(settings.hang_s)
    guard.heard_by(BUSY_S)
    _sweep(settings, None)  # of nodes before this one; the directory's lock is ours
    os.makedirs(f"{settings.runtime_dir}/mnt", mode=0o755, exist_ok=True)
    with listen(settings) as listener:
        try:
            first = True
            while _run_once(
                make(settings, listener),
                lifeline,
                stop_read,
                ready_fd,
                tell=tell,
                first=first,
                guard=guard,
            ):
                first, ready_fd = False, None
                tell("STATUS=a part of the node died; it is started anew")
                if select.select([stop_read], [], [], RESTART_PAUSE_S)[0]:
                    break
        finally:
            tell("STOPPING=1")
            with suppress(OSError):
                os.unlink(f"{settings.runtime_dir}/launcher.sock")
                os.rmdir(f"{settings.runtime_dir}/mnt")
            guard.stop()


def _run_once(
    node: Node,
    lifeline: int | None,
    stop_read: int,
    ready_fd: int | None,
    *,
    tell: Callable[[str], None],
    first: bool,
    guard: Guard,
) -> bool:
    """One life of a node; True when it is to be started again.

    The first start must succeed, or what raised tells the operator why; a later one that fails (a
    node short of memory) is tried again, as daemons and clients wait for it.
    """
    settings = node.settings
    guard.heard_by(BUSY_S)
    try:
        try:
            node.start()
        except (NodeError, OSError) as error:
            if first:
                raise
            print(f"hostd: the node did not start again: {error}", file=sys.stderr)
            return True
        if ready_fd is not None:
            os.write(ready_fd, b"1")
            os.close(ready_fd)
        tell("READY=1\nSTATUS=launcher and zygote run")
        swept_at = time.monotonic()
        orders = [fd for fd in (stop_read, lifeline) if fd is not None]
        while True:
            poller = select.poll()
            for fd in (*orders, *node.watched()):
                poller.register(fd, select.POLLIN)
            guard.heard_by()
            left_s = max(0.0, swept_at + settings.sweep_s - time.monotonic())
            for fd, _ in poller.poll(min(left_s, node.asks_in_s) * 1000):
                if fd in orders:
                    return False
                if not node.serve(fd):
                    return True
            if not node.ask_launcher():
                return True
            if time.monotonic() >= swept_at + settings.sweep_s:
                guard.heard_by(BUSY_S)
                _sweep(settings, node)
                swept_at = time.monotonic()
    finally:
        guard.heard_by(BUSY_S)
        node.stop()


def _sweep(settings: NodeSettings, node: Node | None) -> None:
    """Remove what this instance has left elsewhere; ``node`` is the one that lives."""
    instance = sweep.Instance(
        settings.runtime_dir,
        settings.token_file,
        settings.cgroup_name,
        alive=frozenset() if node is None else node.cgroups,
        node_lives=node is not None,
    )
    try:
        done = sweep.sweep(instance)
    except OSError as error:
        print(f"hostd: nothing could be swept: {error}", file=sys.stderr)
        return
    for leftover, failure in done:
        what = "removed" if failure is None else f"could not remove ({failure})"
        print(f"hostd: swept: {what} {leftover}", file=sys.stderr)
