"""Layers as compressors really write them."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
from collections.abc import Callable

import pytest
import zstandard

from sif_tools.compression import decompressed
from sif_tools.errors import BadLayer, ConvertError, UnsupportedCompression

PLAIN = random.Random(1).randbytes(700_000) + bytes(2_000_000)
SKIPPABLE = b"\x5e\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


def plain(data: bytes, limit: int = 1 << 30) -> bytes:
    source = io.BytesIO(data)
    out = b"".join(decompressed(lambda size: source.read(min(size, limit))))
    assert source.read() == b""
    return out


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("limit", [1 << 30, 7919])
@pytest.mark.parametrize(
    "stored",
    [
        PLAIN,
        gzip.compress(PLAIN),
        gzip.compress(PLAIN[:999]) + gzip.compress(PLAIN[999:]),
        gzip.compress(PLAIN[:999]) + gzip.compress(b"") + gzip.compress(PLAIN[999:]),
        gzip.compress(PLAIN) + bytes(10240),
        zstd(PLAIN),
        zstd(PLAIN[:999]) + zstd(PLAIN[999:]),
        SKIPPABLE + zstd(PLAIN),
        zstd(PLAIN[:999]) + SKIPPABLE + zstd(PLAIN[999:]) + SKIPPABLE,
    ],
    ids=[
        "plain",
        "gzip",
        "gzip members",
        "gzip empty member",
        "gzip padded",
        "zstd",
        "zstd frames",
        "zstd skippable first",
        "zstd skippable between",
    ],
)
def test_understood(stored: bytes, limit: int) -> None:
    assert plain(stored, limit) == PLAIN


def test_empty() -> None:
    assert plain(b"") == b""


@pytest.mark.parametrize("command", [["gzip", "-9"], ["zstd", "-q", "-19"], ["zstd", "--long=27"]])
def test_the_tools_own_output(tool: Callable[[str], str], command: list[str]) -> None:
    tool(command[0])
    made = subprocess.run([*command, "-c"], input=PLAIN, capture_output=True, check=True).stdout
    assert plain(made) == PLAIN


@pytest.mark.parametrize(
    "stored",
    [
        gzip.compress(PLAIN)[:-9],
        gzip.compress(PLAIN)[:5],
        gzip.compress(PLAIN)[:-8] + bytes(8),
        gzip.compress(PLAIN) + b"something else",
        gzip.compress(PLAIN)[:1000] + b"\xff" * 1000,
        zstd(PLAIN) + b"\xff" * 1000,
    ],
)
def test_broken(stored: bytes) -> None:
    with pytest.raises(BadLayer):
        plain(stored)


@pytest.mark.parametrize("command", ["xz", "bzip2"])
def test_others_are_named(tool: Callable[[str], str], command: str) -> None:
    made = subprocess.run([tool(command), "-c"], input=b"x", capture_output=True, check=True).stdout
    with pytest.raises(UnsupportedCompression) as caught:
        plain(made)
    assert command in caught.value.message


def test_a_window_of_gigabytes_is_refused(tool: Callable[[str], str]) -> None:
    made = subprocess.run(
        [tool("zstd"), "-q", "--ultra", "--long=31", "-c"],
        input=bytes(1000),
        capture_output=True,
        check=True,
    ).stdout
    with pytest.raises(ConvertError):
        plain(made)


def test_chunks_stay_small_whatever_the_ratio() -> None:
    for stored in (gzip.compress(bytes(50_000_000)), zstd(bytes(50_000_000))):
        source = io.BytesIO(stored)
        sizes = [len(chunk) for chunk in decompressed(source.read)]
        assert sum(sizes) == 50_000_000
        assert max(sizes) <= 1 << 20
