"""Images made to exhaust whoever opens them, and streams that stop short."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import sif_tools
from sif_tools import errors, limits
from sif_tools.compression import decompressed
from sif_tools.limits import Limits
from sif_tools.merge.merger import Merger
from sif_tools.sources.open import open_source
from sif_tools.sources.source import SourceOptions
from sif_tools.zstd_frames import FrameWalker
from tests.unit.sif_tools.image_factories import LayoutMaker, member, tar_bytes

SMALL = Limits(layer_bytes=20_000_000, ratio=200, entries=1000, content_bytes=50_000_000)


def index(tmp_path: Path, tar: bytes, stored: bytes, given_limits: Limits = SMALL) -> None:
    maker = LayoutMaker(tmp_path / "o")
    maker.add(maker.image([(tar, stored)]))
    options = SourceOptions(limits=given_limits)
    with open_source(f"oci:{maker.finish()}", "amd64", options) as source:
        merger = Merger(given_limits)
        for layer in source.layers:
            merger.index(layer)


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_layer_that_inflates_without_end(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    tar = tar_bytes([member("zeros", bytes(40_000_000))])
    with pytest.raises(errors.TooLarge) as caught:
        index(tmp_path, tar, pack(tar))
    assert caught.value.layer is not None


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_ratio_that_nothing_real_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(limits, "RATIO_FREE_BYTES", 1_000_000)
    tar = tar_bytes([member("zeros", bytes(10_000_000))])
    with pytest.raises(errors.TooLarge) as caught:
        index(tmp_path, tar, pack(tar))
    assert "200 times" in caught.value.message
    index(tmp_path / "more", tar, pack(tar), replace(SMALL, ratio=100_000))


def test_too_many_entries(tmp_path: Path) -> None:
    tar = tar_bytes([member(f"{number}", b"") for number in range(1100)])
    with pytest.raises(errors.TooLarge):
        index(tmp_path, tar, tar)


def sparse_tar(size: int) -> bytes:
    """A file that claims `size` bytes and stores none (PAX 1.0)."""
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "claims",
        "GNU.sparse.realsize": str(size),
    }
    return tar_bytes(
        [member("GNUSparseFile.0/claims", b"0\n".ljust(512, b"\0"), pax_headers=headers)]
    )


@pytest.mark.parametrize("size", [1 << 40, 1 << 60, (1 << 62) - 1])
def test_a_sparse_file_that_claims_more_than_there_is(tmp_path: Path, size: int) -> None:
    tar = sparse_tar(size)
    with pytest.raises(errors.TooLarge) as caught:
        index(tmp_path, tar, tar, Limits())
    assert b"claims" in (caught.value.entry or b"")


def test_many_small_claims_add_up(tmp_path: Path) -> None:
    one = sparse_tar(10_000_000)
    tar = b"".join([one.rstrip(b"\0") + bytes(-len(one.rstrip(b"\0")) % 512)] * 7)
    with pytest.raises(errors.TooLarge):
        index(tmp_path, tar, tar)


def test_a_sparse_file_within_limits_is_stored_as_sparse(
    tool: Callable[[str], str], tmp_path: Path
) -> None:
    tool("tar2sqfs")
    maker = LayoutMaker(tmp_path / "o")
    tar = sparse_tar(500_000_000)
    maker.add(maker.image([(tar, tar)]))
    options = sif_tools.ConvertOptions(architecture="amd64")
    made = sif_tools.convert(f"oci:{maker.finish()}", tmp_path / "s.sif", options)
    assert made.size_bytes < 100_000


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_stream_cut_anywhere_is_found(pack: Callable[[bytes], bytes]) -> None:
    plain = random.Random(5).randbytes(3000) + bytes(300_000) + random.Random(6).randbytes(3000)
    whole = pack(plain)
    for length in [*range(5, 200), *range(len(whole) - 200, len(whole))]:
        with pytest.raises(errors.BadLayer):
            for _ in decompressed(io.BytesIO(whole[:length]).read):
                pass
    assert b"".join(decompressed(io.BytesIO(whole).read)) == plain


def test_zstd_frames_cut_between_are_found_too(tool: Callable[[str], str]) -> None:
    """Of `zstd --long` with several frames and a checksum, as the tool writes them."""
    program = tool("zstd")
    frames = [
        subprocess.run([program, "-q", *flags, "-c"], input=data, capture_output=True, check=True)
        for flags, data in (
            (["-1"], b"a" * 500_000),
            (["-19", "--no-check"], random.Random(1).randbytes(200_000)),
            (["--long=27"], b""),
            (["-3", "--content-size"], b"abc" * 100),
        )
    ]
    skippable = b"\x5a\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"xyz"
    whole = b"".join(frame.stdout + skippable for frame in frames)
    ends = set()
    at = 0
    for frame in frames:
        ends |= {at + len(frame.stdout), at + len(frame.stdout) + len(skippable)}
        at += len(frame.stdout) + len(skippable)
    for step in (1, 7, 4096):
        walker = FrameWalker()
        found = set()
        for start in range(0, len(whole), step):
            walker.feed(whole[start : start + step])
            if walker.at_end:
                found.add(min(start + step, len(whole)))
        assert found <= ends
        assert len(whole) in found
        if step == 1:
            assert found == ends


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 300), st.integers(1, 255), st.booleans())
def test_a_damaged_gzip_stream_never_gives_other_bytes(
    data: bytes, at: int, change: int, again: bool
) -> None:
    """The trailer's CRC sees every change of one byte; header fields may change nothing."""
    plain = data * 40 if again else data
    stored = bytearray(gzip.compress(plain))
    stored[at % len(stored)] ^= change
    try:
        found = b"".join(decompressed(io.BytesIO(bytes(stored)).read))
    except errors.ConvertError:
        return
    assert found == plain or at % len(stored) < 10


def test_memory_stays_small_whatever_a_layer_claims(tmp_path: Path) -> None:
    """A zstd block may say `one byte, 128 KiB times`; in a process with peaks of its own."""
    tar = tar_bytes([member("zeros", bytes(300_000_000))])
    (tmp_path / "layer").write_bytes(zstd(tar))
    program = (
        "import sys, resource\n"
        "from sif_tools.compression import decompressed\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    total = sum(map(len, decompressed(file.read)))\n"
        "print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "layer"], capture_output=True, check=True
    )
    total, grown_kib = map(int, done.stdout.split())
    assert total == len(tar)
    assert grown_kib < 40_000


def test_a_tar_of_the_standard_library_is_still_read(tmp_path: Path) -> None:
    """The limits refuse nothing ordinary."""
    path = tmp_path / "t"
    with tarfile.open(path, "w") as tar:
        tar.add(Path(sif_tools.__file__).parent, "code", filter=lambda one: one)
    index(tmp_path, path.read_bytes(), gzip.compress(path.read_bytes()), Limits())
