"""What a rollout may at most move: large stdin and stdout, a large file, a directory of many files.

Memory is that of the daemon that serves HTTP and of this very process, the client's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.client import Client, Sandbox
from tests.framework.daemon import Daemon
from tests.framework.transfers import (
    GIB,
    MIB,
    PeakMemory,
    Stopwatch,
    digest_of,
    read_tree,
    write_large_file,
    write_tree,
)

FLAT_MIB = 48
"""What may come and go on the way: buffers of both servers' sockets, the allocator's rest."""


@pytest.fixture
def box(daemon: Daemon) -> Iterator[Sandbox]:
    limits = {"disk_mb": 2400, "inodes": 40_000}
    with Client(daemon.base_url, daemon.token) as client:
        with client.create("busybox", limits=limits) as sandbox:
            yield sandbox


def test_fifty_mebibytes_of_stdin_and_of_stdout(box: Sandbox):
    data = hashlib.shake_256(b"fifty").digest(50 * MIB)
    watch = Stopwatch("stdin and stdout of 50 MiB each", 100 * MIB)
    result = box.exec(["cat"], stdin=data, max_output_bytes=50 * MIB, timeout_s=120)
    print(watch.rate())
    assert result.stdout_total_bytes == len(data)
    assert not result.stdout_truncated
    assert result.stdout_bytes == data
    text = "grüße, " * (50 * MIB // 10)
    assert box.exec(["cat"], stdin=text, max_output_bytes=64 * MIB, timeout_s=120).stdout == text


def test_a_gigabyte_of_yes_at_a_mebibyte_is_flat(box: Sandbox, daemon: Daemon):
    memory = PeakMemory(daemon.api_pid, os.getpid())
    watch = Stopwatch("1 GB of yes at a 1 MiB cap", 10**9)
    result = box.exec("yes | head -c 1000000000", max_output_bytes=MIB, timeout_s=300)
    grown = memory.grown_mib()
    print(watch.rate(), f"{grown:.1f} MiB grown")
    assert result.stdout_total_bytes == 10**9
    assert result.stdout_bytes == b"y\n" * (MIB // 2)
    assert grown < FLAT_MIB


def test_a_gigabyte_streamed_is_flat(box: Sandbox, daemon: Daemon):
    memory = PeakMemory(daemon.api_pid, os.getpid())
    watch = Stopwatch("1 GB of yes as frames", 10**9)
    told = 0
    with box.exec_stream("yes | head -c 1000000000", timeout_s=300) as stream:
        for output in stream:
            told += len(output.data)
            assert output.data[:2] in (b"y\n", b"\ny")
        assert stream.exit.stdout_total_bytes == told == 10**9
    print(watch.rate(), f"{memory.grown_mib():.1f} MiB grown")
    assert memory.grown_mib() < FLAT_MIB


@pytest.mark.timeout(900)
def test_two_gigabytes_in_and_out_are_flat(box: Sandbox, daemon: Daemon, tmp_path: Path):
    size = 2 * GIB
    digest = write_large_file(tmp_path / "in", size)
    memory = PeakMemory(daemon.api_pid, os.getpid())
    watch = Stopwatch("upload of 2 GiB", size)
    assert box.upload_file(tmp_path / "in", "/work/large").size_bytes == size
    print(watch.rate(), f"{memory.grown_mib():.1f} MiB grown")
    assert memory.grown_mib() < FLAT_MIB
    inside = box.exec(["sha256sum", "/work/large"], timeout_s=300).stdout.split()[0]
    assert inside == digest
    memory = PeakMemory(daemon.api_pid, os.getpid())
    watch = Stopwatch("download of 2 GiB", size)
    assert box.download_file("/work/large", tmp_path / "out") == size
    print(watch.rate(), f"{memory.grown_mib():.1f} MiB grown")
    assert memory.grown_mib() < FLAT_MIB
    assert digest_of(tmp_path / "out") == digest
    assert box.read_file("/work/large", offset=MIB, length=8) == (1).to_bytes(8, "big")
    for name in ("in", "out"):
        (tmp_path / name).unlink()


@pytest.mark.timeout(900)
def test_a_directory_of_ten_thousand_files(box: Sandbox, tmp_path: Path):
    written = write_tree(tmp_path / "in", 10_000)
    size = sum(map(len, written.values()))
    watch = Stopwatch("upload of 10,000 files", size)
    assert box.upload_dir(tmp_path / "in", "/work/tree") == 10_000 + 100
    print(f"{watch.rate()}, {watch.rate().seconds:.1f} s")
    assert box.exec("find /work/tree -type f | wc -l").stdout.strip() == "10000"
    found = box.find("/work/tree", pattern="f77*", type="file", limit=200)
    assert len(found.entries) == 111  # 77, 770 to 779, 7700 to 7799
    watch = Stopwatch("download of 10,000 files", size)
    back = box.download_dir("/work/tree", tmp_path / "out")
    print(f"{watch.rate()}, {watch.rate().seconds:.1f} s")
    assert (back.members, back.skipped) == (10_100, [])
    assert read_tree(tmp_path / "out") == written
