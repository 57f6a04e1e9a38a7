"""Transfers by the client: whole, in parts, filtered, at flat memory; sizes are the load tier's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd import errors
from sandboxd.client import Client, ClientMisused, Sandbox
from tests.framework.daemon import Daemon
from tests.framework.transfers import (
    MIB,
    PeakMemory,
    digest_of,
    read_tree,
    write_large_file,
    write_tree,
)

FLAT_MIB = 32


@pytest.fixture
def box(daemon: Daemon) -> Iterator[Sandbox]:
    with Client(daemon.base_url, daemon.token) as client:
        with client.create("busybox", limits={"disk_mb": 256}) as sandbox:
            yield sandbox


def test_a_large_file_in_and_out_is_flat(box: Sandbox, daemon: Daemon, tmp_path: Path):
    size = 200 * MIB
    digest = write_large_file(tmp_path / "in", size)
    memory = PeakMemory(daemon.api_pid, os.getpid())
    assert box.upload_file(tmp_path / "in", "/work/large").size_bytes == size
    assert box.exec(["sha256sum", "/work/large"], timeout_s=60).stdout.split()[0] == digest
    assert box.download_file("/work/large", tmp_path / "out") == size
    assert memory.grown_mib() < FLAT_MIB
    assert digest_of(tmp_path / "out") == digest


def test_parts_of_a_file(box: Sandbox):
    data = bytes(range(256)) * 1000
    box.write_file("/work/f", data, owner="agent", mode=0o640)
    entry = box.stat("/work/f")
    assert (entry.uid, entry.mode) == (1000, 0o640)
    for offset, length in ((0, 1), (1, 255), (70_000, 100_000), (255_990, 100)):
        assert box.read_file("/work/f", offset=offset, length=length) == data[offset:][:length]
    assert box.read_file("/work/f", offset=200_000) == data[200_000:]
    assert box.read_file("/work/f", offset=-7) == data[-7:]
    with pytest.raises(errors.RangeNotSatisfiable):
        box.read_file("/work/f", offset=256_000)
    for wrong in ({"length": 0}, {"offset": -1, "length": 1}):
        with pytest.raises(ClientMisused):
            box.read_file("/work/f", **wrong)


def test_finding_files(box: Sandbox):
    for name in ("a.py", "b.txt", "sub/c.py", "sub/deep/d.py", "node_modules/e.py"):
        box.write_file(f"/work/{name}", name)
    box.exec("ln -s a.py /work/link.py")

    def names(**wanted: object) -> list[str]:
        listing = box.find("/work", **wanted)  # type: ignore[arg-type]
        assert not listing.truncated
        return [entry.path.removeprefix("/work/") for entry in listing.entries]

    everywhere = ["a.py", "link.py", "node_modules/e.py", "sub/c.py", "sub/deep/d.py"]
    assert names(pattern="*.py") == everywhere
    assert names(pattern=["*.py", "*.txt"], exclude="node_modules", type="file") == [
        *("a.py", "b.txt", "sub/c.py", "sub/deep/d.py")
    ]
    assert names(pattern="sub/**/*.py") == ["sub/c.py", "sub/deep/d.py"]
    assert names(type=["symlink", "directory"]) == ["link.py", "node_modules", "sub", "sub/deep"]
    assert names(type="file", depth=1, min_size=5) == ["b.txt"]
    assert names(type="file", modified_after=4e9) == []
    assert box.find("/work", limit=2).truncated
    assert [e.name for e in box.list_dir("/work", recursive=True, depth=2).entries if e.is_dir] == [
        *("node_modules", "sub", "deep")
    ]


def test_parts_of_a_directory(box: Sandbox, tmp_path: Path):
    written = write_tree(tmp_path / "in", 1000)
    assert box.upload_dir(tmp_path / "in", "/work/all", owner="agent") == 1010
    box.download_dir("/work/all", tmp_path / "all")
    assert read_tree(tmp_path / "all") == written
    box.upload_dir(tmp_path / "in", "/work/some", include=["d1"], exclude=["*7"])
    box.download_dir("/work/some", tmp_path / "some")
    expected = {
        name: data
        for name, data in written.items()
        if name.startswith("d1/") and not name.endswith("7")
    }
    assert read_tree(tmp_path / "some") == expected
    with pytest.raises(errors.FileNotFound):
        box.upload_dir(tmp_path / "in", "/work/none/there", parents=False)
    box.exec("chmod 0 /work/some/d1/f100")
    with pytest.raises(errors.FileAccessDenied):
        box.download_dir("/work/some", tmp_path / "denied", user="agent")
    kept = box.download_dir("/work/some", tmp_path / "kept", skip_unreadable=True, user="agent")
    assert kept.members == len(expected)


def test_moving_where_there_is_no_directory_yet(box: Sandbox):
    box.write_file("/work/f", "x")
    with pytest.raises(errors.FileNotFound):
        box.move("/work/f", "/work/new/f", parents=False)
    assert box.move("/work/f", "/work/new/f").path == "/work/new/f"
