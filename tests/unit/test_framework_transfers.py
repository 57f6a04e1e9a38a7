"""The load tier's own measures can find what they are there to find."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.framework.transfers import MIB, PeakMemory, read_tree, write_large_file, write_tree


def test_memory_that_is_taken_for_a_moment_is_seen() -> None:
    memory = PeakMemory(os.getpid())
    taken = bytearray(64 * MIB)
    taken[::4096] = b"x" * len(taken[::4096])
    del taken
    assert memory.grown_mib() > 60
    # What was there before does not count.
    assert PeakMemory(os.getpid()).grown_mib() < 32


def test_a_large_file_is_nowhere_like_itself(tmp_path: Path) -> None:
    digest = write_large_file(tmp_path / "large", 3 * MIB)
    told = subprocess.run(["sha256sum", tmp_path / "large"], capture_output=True, check=True)
    assert told.stdout.split()[0].decode() == digest
    data = (tmp_path / "large").read_bytes()
    assert len({data[at : at + MIB] for at in range(0, len(data), MIB)}) == 3


def test_a_tree_is_as_it_was_written(tmp_path: Path) -> None:
    written = write_tree(tmp_path, 250)
    assert len(written) == 250
    assert read_tree(tmp_path) == written
    (tmp_path / "d1/f150").write_bytes(b"of another")
    assert read_tree(tmp_path) != written
