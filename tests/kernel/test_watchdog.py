"""What the watchdog counts, against processes that hold a known amount."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandboxd.launcher.watchdog import descendants, measure
from tests.framework import times

pytestmark = pytest.mark.needs("root")

SIZE = 64 << 20
SLACK = 16 << 20
"""What a Python has of its own is less, here some 6 MiB."""

_START = """
import mmap, os, signal
SIZE = 64 << 20
"""
PRIVATE = "m = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); m.write(b'x' * SIZE)"
MEMFD = "fd = os.memfd_create('held'); os.write(fd, b'x' * SIZE)"
SHARED = "m = mmap.mmap(-1, SIZE); m.write(b'x' * SIZE)"
FORKED = """
for _ in range(3):
    if os.fork() == 0:
        held = [m[at] for at in range(0, SIZE, 4096)] if 'm' in globals() else None
        os.write(1, b'r')
        signal.pause()
"""


@contextmanager
def process(*lines: str, count: int = 1) -> Iterator[int]:
    """One that has done this, and waits; `count` of its family say that they have."""
    script = "\n".join((_START, *lines, "os.write(1, b'r'); signal.pause()"))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout is not None
            said = b""
            while len(said) < count:
                more = started.stdout.read(1)
                assert more
                said += more
            yield started.pid
        finally:
            for pid in (*descendants(started.pid), started.pid):
                subprocess.run(["kill", f"-{signal.SIGKILL}", str(pid)], check=True)


def family(pid: int) -> list[int]:
    return [pid, *descendants(pid)]


def test_private_memory_is_counted() -> None:
    with process() as idle, process(PRIVATE) as pid:
        assert measure([idle], 0).memory_bytes < SLACK
        assert SIZE <= measure([pid], 0).memory_bytes < SIZE + SLACK
        assert measure([idle, pid], 0).largest == pid


def test_a_memfd_that_is_mapped_nowhere_is_counted() -> None:
    with process(MEMFD) as pid:
        assert SIZE <= measure([pid], 0).memory_bytes < SIZE + SLACK


def test_a_memfd_that_several_have_is_counted_once() -> None:
    with process(MEMFD, FORKED, count=4) as pid:
        assert len(family(pid)) == 4
        assert SIZE <= measure(family(pid), 0).memory_bytes < SIZE + 4 * SLACK


@pytest.mark.parametrize("kind", [PRIVATE, SHARED])
def test_pages_that_several_have_are_counted_once_where_it_matters(kind: str) -> None:
    with process(kind, FORKED, count=4) as pid:
        assert SIZE <= measure(family(pid), SIZE // 2).memory_bytes < SIZE + 4 * SLACK
        # Positive control: the cheap figure has them four times, and where that is within the
        # limit it is not asked further.
        assert measure(family(pid), 100 * SIZE).memory_bytes > 3 * SIZE


def test_all_below_a_process_are_its_own() -> None:
    with process(FORKED, count=4) as pid:
        assert len(list(descendants(pid))) == 3
        assert measure(family(pid), 100 * SIZE).tasks == 4


def test_threads_count_as_the_kernel_counts_them() -> None:
    threads = "import threading; [threading.Thread(target=signal.pause).start() for _ in range(2)]"
    with process(threads.replace("signal.pause", "threading.Event().wait")) as pid:
        deadline = time.monotonic() + times.scaled(10)
        while measure([pid], 100 * SIZE).tasks != 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_has_ended_counts_for_nothing() -> None:
    with process(PRIVATE) as pid:
        pass
    assert measure([pid], 0).memory_bytes == 0
    assert list(descendants(pid)) == []
