"""Compressions: what is made is read by the tools that are there, and what is not is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import sif_tools
from sif_tools import errors
from sif_tools.readers import READER, can_read, check_readable
from sif_tools.squashfs import Compression, SquashfsOptions, squashfs_from_tar
from sif_tools.tarstream.entry import Entry, Kind
from sif_tools.tarstream.writer import TarWriter

DATA = b"".join(b"%d line\n" % number for number in range(100_000))


def write(writer: TarWriter) -> int:
    writer.add(b"", Entry(b"", Kind.DIRECTORY))
    writer.add(b"file", Entry(b"file", Kind.FILE, size_bytes=len(DATA)), [DATA])
    return 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SquashfsOptions(), "zstd, level 3"),
        (SquashfsOptions(level=19, block_size_bytes=1 << 20), "zstd, level 19"),
        (SquashfsOptions(Compression.GZIP), "gzip, level 9"),
        (SquashfsOptions(Compression.GZIP, level=1, block_size_bytes=4096), "gzip, level 1"),
        (SquashfsOptions(Compression.LZ4), "lz4, normal"),
        (SquashfsOptions(Compression.LZ4, level=2), "lz4, high"),
        (SquashfsOptions(Compression.XZ), "xz"),
    ],
)
def test_what_unsquashfs_says_of_it(
    tool: Callable[[str], str], tmp_path: Path, options: SquashfsOptions, said: str
) -> None:
    tool("tar2sqfs")
    unsquashfs, rdsquashfs = tool("unsquashfs"), tool("rdsquashfs")
    made = []
    for _ in range(2):
        with squashfs_from_tar(write, options) as (image, size):
            made.append(image.read())
            assert len(made[0]) == size
    assert made[0] == made[1]
    path = tmp_path / "s"
    path.write_bytes(made[0])
    shown = subprocess.run([unsquashfs, "-s", path], capture_output=True, check=True, text=True)
    name, _, mode = said.partition(", ")
    assert f"Compression {name}" in shown.stdout
    assert f"Block size {options.block_size_bytes}\n" in shown.stdout
    if name != "zstd" and mode == "level 9":
        mode = ""  # the default is not stored
    for word in mode.replace("level ", "compression-level ").split(", "):
        if word and name != "lz4":
            assert word in shown.stdout
    if name == "lz4":
        assert ("High" in shown.stdout) == (mode == "high")
    cat = subprocess.run([rdsquashfs, "--cat", "/file", path], capture_output=True, check=True)
    assert cat.stdout == DATA


@pytest.mark.parametrize(
    "options",
    [
        SquashfsOptions(level=0),
        SquashfsOptions(level=23),
        SquashfsOptions(Compression.GZIP, level=10),
        SquashfsOptions(Compression.LZ4, level=3),
        SquashfsOptions(Compression.XZ, level=10),
        SquashfsOptions(block_size_bytes=2048),
        SquashfsOptions(block_size_bytes=2 << 20),
        SquashfsOptions(block_size_bytes=100_000),
    ],
)
def test_what_cannot_be_made(options: SquashfsOptions) -> None:
    with pytest.raises(errors.ConvertError):
        options.check()


def test_what_readers_are_said_to_read() -> None:
    check_readable("gzip", {"gzip", "zstd"})
    with pytest.raises(errors.CannotBeRead):
        check_readable("xz", {"gzip", "zstd"})


def test_what_the_reader_here_can_read(tool: Callable[[str], str]) -> None:
    """squashfuse has never been able to read the LZMA of before XZ."""
    reader, writer = tool(READER), tool("tar2sqfs")
    assert can_read(reader, writer, "gzip")
    assert not can_read(reader, writer, "lzma")


def test_an_image_that_the_reader_here_cannot_read_is_not_made(
    tool: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool("tar2sqfs")
    # As a build without it says it.
    reader = tmp_path / READER
    reader.write_text(
        "#!/bin/sh\necho 'Squashfs image uses zstd compression, this version supports only"
        " zlib.' >&2\nexit 255\n"
    )
    reader.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "root").mkdir()
    source, target = f"rootfs:{tmp_path}/root", tmp_path / "x.sif"
    with pytest.raises(errors.CannotBeRead):
        sif_tools.convert(source, target)
    assert not target.exists()
    known = SquashfsOptions(readers=frozenset({"zstd"}))
    sif_tools.convert(source, target, sif_tools.ConvertOptions(squashfs=known))
