"""Copies of hot images: when one is made, what goes for it, and what is not believed."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from pathlib import Path

import pytest

from sandboxd.images.checked import CheckedImage
from sandboxd.images.copies import HOT_USES, Copies
from sandboxd.model import ImageConfig

SIZE = 10_000


class Store:
    """Files by digest, as those of a slow store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.mounted: set[str] = set()
        self.opened: list[str] = []

    def image(self, letter: str, size_bytes: int = SIZE) -> CheckedImage:
        data = letter.encode() * size_bytes
        digest = hashlib.sha256(data).hexdigest()
        path = self.directory / digest
        path.write_bytes(data)
        return CheckedImage(
            name=letter,
            key=f"key-of-{letter}",
            sif_offset=4096,
            size_bytes=size_bytes,
            config=ImageConfig(),
            path=str(path),
            digest=digest,
        )

    def open(self, image: CheckedImage) -> int:
        self.opened.append(image.name)
        return os.open(image.path, os.O_RDONLY)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    directory = tmp_path / "local"
    directory.mkdir()
    return directory


def copies_of(store: Store, local: Path, budget_bytes: int = 3 * SIZE) -> Copies:
    return Copies(
        str(local),
        budget_bytes,
        open_source=store.open,
        is_mounted=store.mounted.__contains__,
    )


async def settle(copies: Copies) -> None:
    if copies._working is not None:
        await copies._working


async def heat(copies: Copies, image: CheckedImage) -> None:
    for _ in range(HOT_USES):
        copies.nearest(image)
    await settle(copies)


def test_an_image_that_is_asked_for_again_is_copied_and_used_from_then_on(store, local):
    async def work():
        copies, image = copies_of(store, local), store.image("a")
        for _ in range(HOT_USES - 1):
            assert copies.nearest(image) is image
        await settle(copies)
        assert os.listdir(local) == []
        await heat(copies, image)
        near = copies.nearest(image)
        assert near.path == str(local / f"{image.digest}.sif")
        assert Path(near.path).read_bytes() == b"a" * SIZE
        assert os.stat(near.path).st_mode & 0o777 == 0o444
        assert (near.digest, near.sif_offset, near.name) == (image.digest, 4096, "a")
        assert near.key != image.key
        assert (copies.count, copies.bytes, copies.made, copies.has(image)) == (1, SIZE, 1, True)
        await heat(copies, image)
        assert store.opened == ["a"]

    asyncio.run(work())


def test_all_parts_of_an_image_are_needed_for_it_to_be_local(store, local):
    async def work():
        copies, base = copies_of(store, local), store.image("b")
        top = store.image("t")
        stacked = CheckedImage(
            name="stack",
            key=top.key,
            sif_offset=0,
            size_bytes=2 * SIZE,
            config=ImageConfig(),
            digest=top.digest,
            below=(base,),
        )
        await heat(copies, top)
        assert not copies.has(stacked)
        await heat(copies, base)
        assert copies.has(stacked)

    asyncio.run(work())


def test_the_longest_unused_goes_first_and_never_one_that_is_mounted(store, local):
    async def work():
        copies = copies_of(store, local)
        a, b, c, d, e = (store.image(letter) for letter in "abcde")
        for image in (a, b, c):
            await heat(copies, image)
        for number, image in enumerate((b, a, c)):  # in this order they were used
            copies._copies[image.digest].used_at = 1000.0 + number
        store.mounted.add(copies._copies[b.digest].key)
        await heat(copies, d)
        assert [copies.has(image) for image in (a, b, c, d)] == [False, True, True, True]
        assert (copies.bytes, copies.evicted) == (3 * SIZE, 1)
        assert len(os.listdir(local)) == 3
        store.mounted |= {copy.key for copy in copies._copies.values()}
        await heat(copies, e)
        assert not copies.has(e)
        assert (copies.bytes, copies.evicted, copies.failed) == (3 * SIZE, 1, 0)

    asyncio.run(work())


def test_copies_that_cannot_be_removed_are_still_counted_and_hold_no_file_open(
    store, local, monkeypatch
):
    def read_only(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    async def work():
        copies = copies_of(store, local, SIZE)
        a, b = store.image("a"), store.image("b")
        await heat(copies, a)
        await heat(copies, b)
        assert (copies.has(b), copies.evicted) == (True, 1)
        monkeypatch.setattr(os, "unlink", read_only)
        before = os.listdir("/proc/self/fd")
        await heat(copies, a)
        assert os.listdir("/proc/self/fd") == before
        assert (copies.has(a), copies.has(b), copies.bytes) == (False, True, SIZE)
        assert (copies.failed, copies.evicted) == (1, 1)

    asyncio.run(work())


def test_one_that_is_larger_than_all_the_room_evicts_nothing(store, local):
    async def work():
        copies = copies_of(store, local)
        small, large = store.image("s"), store.image("l", 3 * SIZE + 1)
        await heat(copies, small)
        await heat(copies, large)
        assert (copies.has(small), copies.has(large), copies.evicted) == (True, False, 0)

    asyncio.run(work())


def test_bytes_of_another_digest_are_not_kept(store, local):
    async def work():
        copies, image = copies_of(store, local), store.image("a")
        Path(image.path).write_bytes(b"b" * SIZE)
        await heat(copies, image)
        assert (copies.has(image), copies.failed) == (False, 1)
        assert os.listdir(local) == []
        assert copies.nearest(image) is image

    asyncio.run(work())


def test_a_store_that_cannot_be_read_is_left_alone_for_a_while(store, local):
    async def work():
        copies, image = copies_of(store, local), store.image("a")
        os.unlink(image.path)
        for _ in range(5):
            await heat(copies, image)
        assert (copies.failed, store.opened) == (1, ["a"])

    asyncio.run(work())


def test_a_copy_that_cannot_be_used_is_forgotten_and_the_stores_own_taken(store, local):
    async def work():
        copies, image = copies_of(store, local), store.image("a")
        await heat(copies, image)
        near = copies.nearest(image)
        os.unlink(near.path)
        copies.forget(near)
        assert copies.nearest(image) is image
        copies.forget(image)  # of the store's file nothing is removed
        assert Path(image.path).exists()

    asyncio.run(work())


def test_the_next_daemon_knows_them_and_clears_what_was_half_made(store, local):
    async def work():
        first, image = copies_of(store, local), store.image("a")
        await heat(first, image)
        key = first.nearest(image).key
        (local / ".half.0123.tmp").write_bytes(b"x")
        second = copies_of(store, local)
        assert second.nearest(image).key == key
        assert os.listdir(local) == [f"{image.digest}.sif"]
        # With less room than they take, the longest unused goes.
        third = copies_of(store, local, SIZE - 1)
        assert (third.count, os.listdir(local)) == (0, [])

    asyncio.run(work())


def test_without_room_nothing_is_counted_or_looked_at(store, tmp_path):
    async def work():
        copies, image = copies_of(store, tmp_path / "none", 0), store.image("a")
        await heat(copies, image)
        assert (copies.nearest(image), copies.count, store.opened) == (image, 0, [])

    asyncio.run(work())


def test_what_cannot_be_removed_at_the_start_costs_the_copies_and_no_more(store, local):
    async def work():
        (local / ".half.0123.tmp").mkdir()
        copies, image = copies_of(store, local), store.image("a")
        await heat(copies, image)
        assert (copies.has(image), copies.budget_bytes, copies.failed) == (False, 0, 0)
        assert copies.nearest(image) is image

    asyncio.run(work())


def test_a_directory_that_is_not_there_costs_the_copies_and_no_more(store, tmp_path):
    async def work():
        copies, image = copies_of(store, tmp_path / "none"), store.image("a")
        await heat(copies, image)
        assert (copies.nearest(image), copies.budget_bytes) == (image, 0)

    asyncio.run(work())
