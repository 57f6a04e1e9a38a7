"""Who watches hostd: what is silent is killed, and nothing else is."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sandboxd.guard import TICKS, Silence
from sandboxd.host.node import PING, Node

HOSTD = """
import sys, time
from sandboxd.guard import Guard
guard = Guard(float(sys.argv[1]))
guard.heard_by()
print(guard._process.pid, flush=True)
while sys.stdin.readline():
    guard.heard_by()
"""


def hostd(limit_s: float) -> subprocess.Popen[str]:
    """A process with a guard. It says that it lives for each line that it is sent."""
    return subprocess.Popen(
        [sys.executable, "-c", HOSTD, str(limit_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_what_is_silent_is_killed_and_named():
    with hostd(0.2) as silent:
        assert silent.wait(60) == -signal.SIGKILL
        assert silent.stderr is not None
        assert silent.stderr.read() == "hostd: it does not go on for 0.2 s; killed\n"


def test_the_guard_ends_with_what_it_watches():
    with hostd(60) as watched:
        assert watched.stdout is not None
        guard = int(watched.stdout.readline())
        pidfd = os.pidfd_open(guard)
        watched.kill()
        # Its stderr is at its end once nobody holds it: the guard neither.
        assert watched.communicate(timeout=60)[1] == ""
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)


def test_what_says_that_it_lives_is_spared():
    with hostd(1.0) as alive:
        assert alive.stdin is not None
        for _ in range(3 * TICKS):
            assert alive.poll() is None
            alive.stdin.write("\n")
            alive.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                alive.wait(0.1)
        alive.stdin.close()
        assert alive.wait(30) == 0


def test_a_tick_counts_once_however_late_it_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    """Whoever was suspended with what it watches has missed much time and one tick."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    silence = Silence(10.0)
    now[0] += 3600
    assert silence.lasts()
    assert not silence.lasts()
    assert not silence.is_too_long
    for _ in range(TICKS):
        now[0] += 1.0
        assert silence.lasts()
    assert silence.is_too_long
    silence.broken()
    assert not silence.is_too_long


def asking(limit_s: float) -> tuple[Node, socket.socket]:
    """hostd's end of a node, as far as it hears of its launcher; and the launcher's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = Node.__new__(Node)
    node._settings = SimpleNamespace(hang_s=limit_s)
    node._silence = Silence(limit_s)
    node.sock = ours
    node._pidfds = {}
    node._openers = node._images = SimpleNamespace(pidfds=[])
    return node, theirs


def test_a_launcher_that_dies_as_it_is_asked_is_no_end_of_hostd():
    """Between two looks at its pidfd."""
    node, theirs = asking(1000)
    theirs.close()
    node._silence._due = 0.0
    assert node.ask_launcher()
    node.sock.close()


def test_a_launcher_that_reads_nothing_holds_hostd_up_in_nothing():
    node, theirs = asking(1000)
    with theirs, node.sock:
        with pytest.raises(BlockingIOError):
            while True:
                node.sock.send(PING, socket.MSG_DONTWAIT)
        node._silence._due = 0.0
        assert node.ask_launcher()


def test_a_launcher_that_died_with_something_unread_or_unanswered_is_a_node_that_failed():
    node, theirs = asking(1000)
    with node.sock:
        node.sock.send(PING)
        theirs.close()
        assert not node.serve(node.sock.fileno())
    node, theirs = asking(1000)
    node._openers.open = lambda *_: node.sock.send(b"{}")
    with node.sock:
        theirs.send(b'{"verb": "mount", "id": 1}')
        theirs.close()
        node._launcher_pid = 0
        assert not node.serve(node.sock.fileno())
