"""Much data in and out of a sandbox, and what that costs the memory of those on the way.

For: the e2e tier in a small form, the load tier in full. Bytes are made from a number, so that what
comes out can be told from what went in without keeping either.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30
_BLOCK = hashlib.shake_256(b"a block of a large file").digest(MIB)


class PeakMemory:
    """How far the memory of processes rises above where it was. ``VmHWM`` set anew, proc(5)."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = {pid: _peak_kib(pid) for pid in pids}

    def grown_mib(self) -> float:
        return max((_peak_kib(pid) - self._before[pid]) / 1024 for pid in self._pids)


def _peak_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


@dataclass(frozen=True)
class Rate:
    what: str
    size_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.what}: {self.size_bytes / MIB / self.seconds:.0f} MiB/s"


class Stopwatch:
    def __init__(self, what: str, size_bytes: int) -> None:
        self._what, self._size_bytes = what, size_bytes
        self._began = time.perf_counter()

    def rate(self) -> Rate:
        return Rate(self._what, self._size_bytes, time.perf_counter() - self._began)


def write_large_file(path: Path, size_bytes: int) -> str:
    """Its SHA-256. No two of its MiB are alike."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for number in range(size_bytes // MIB):
            block = number.to_bytes(8, "big") + _BLOCK[8:]
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tree(root: Path, files: int) -> dict[str, bytes]:
    """Files in directories of a hundred; what is in each, by its name below ``root``."""
    written = {}
    for number in range(files):
        name = f"d{number // 100}/f{number}"
        path = root / name
        if number % 100 == 0:
            path.parent.mkdir(parents=True)
        data = hashlib.shake_128(name.encode()).digest(number % 1500)
        path.write_bytes(data)
        written[name] = data
    return written


def read_tree(root: Path) -> dict[str, bytes]:
    return {
        os.path.relpath(path, root): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
