"""gzip around archives: whole, cut, several members, and one that grows beyond all reason."""

import asyncio
import gzip
import os
import zlib

import pytest

from sandboxd.errors import ArchiveInvalid
from sandboxd.runtime import archives


async def pieces(data, size):
    for at in range(0, len(data), size):
        yield data[at : at + size]


def through(work, data, size=1000):
    async def run():
        return b"".join([part async for part in work(pieces(data, size))])

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_both_ways(size):
    data = os.urandom(5000) + bytes(3000)
    assert gzip.decompress(through(archives.gzip, data, size)) == data
    assert through(archives.gunzip, gzip.compress(data), size) == data
    several = gzip.compress(data) + gzip.compress(b"") + gzip.compress(b"end") + bytes(512)
    assert through(archives.gunzip, several, size) == data + b"end"


def test_much_comes_in_parts():
    data = bytes(3 * archives.PART_BYTES)
    assert through(archives.gunzip, gzip.compress(data), 1 << 20) == data


@pytest.mark.parametrize(
    "data", [b"", b"x", gzip.compress(b"x" * 100)[:-1], gzip.compress(b"x") + b"junk", bytes(100)]
)
def test_what_is_no_gzip(data):
    with pytest.raises(ArchiveInvalid) as caught:
        through(archives.gunzip, data)
    assert caught.value.detail["reason"] == "gzip"


def test_a_wrong_checksum():
    data = bytearray(gzip.compress(b"content"))
    data[-5] ^= 1
    with pytest.raises(ArchiveInvalid):
        through(archives.gunzip, bytes(data))


def test_a_bomb(monkeypatch):
    monkeypatch.setattr(archives, "RATIO_FREE_BYTES", 1 << 20)
    bomb = gzip.compress(bytes(8 << 20))
    assert len(bomb) * archives.RATIO_MAX < 8 << 20
    with pytest.raises(ArchiveInvalid) as caught:
        through(archives.gunzip, bomb)
    assert caught.value.detail["reason"] == "ratio"
    # The control: what is as large and no bomb.
    fine = zlib.compressobj(0, zlib.DEFLATED, archives.GZIP)
    assert len(through(archives.gunzip, fine.compress(bytes(8 << 20)) + fine.flush())) == 8 << 20
