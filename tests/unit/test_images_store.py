"""From a name to a checked SIF: the names that are refused, and files that change under us."""

import asyncio
import os
import platform
import struct

import pytest

import sif_tools
from sandboxd.errors import ImageInvalid, ImageNotFound, ImageUnavailable
from sandboxd.images import store as store_module
from sandboxd.images.store import ImageStore

# A squashfs superblock that holds together; nothing behind it is looked at before mounting.
SUPERBLOCK = struct.pack(
    "<4sIIIIHHHHHHQQQQQQQQ",
    b"hsqs", 1, 0, 131072, 0, 1, 17, 0, 1, 4, 0, 0, 4096,
    96, 96, 96, 96, 96, 96,
)[:96]  # fmt: skip


def write_image(path, *, config=b"{}", payload=b"", arch=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    squashfs = path.with_suffix(".squashfs")
    squashfs.write_bytes(SUPERBLOCK.ljust(8192, b"\0") + payload)
    make_sif(path, squashfs, config, arch or machine)
    squashfs.unlink()


def make_sif(path, squashfs, config, arch):
    """Header and two descriptors by hand, as the format's tables say (not by the code it tests)."""
    body = squashfs.read_bytes()
    code = {"amd64": b"02\0", "arm64": b"04\0", "386": b"01\0"}[arch]
    offset = 36864
    config_at = offset + len(body)
    header = struct.pack(
        "<32s10s3s3s16sqqqqqqqq",
        b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0", b"01\0", code, b"u" * 16,
        0, 0, 46, 48, 4096, 28080, 32176, config_at + len(config) - 32176,
    )  # fmt: skip

    def descriptor(*, kind, number, at, size, name, extra):
        return struct.pack(
            "<iBIIIqqqqqqq128s384s",
            kind, 1, number, 0xF0000001, 0, at, size, size, 0, 0, 0, 0, name, extra,
        )  # fmt: skip

    table = descriptor(
        kind=0x4004, number=1, at=offset, size=len(body), name=b"root",
        extra=struct.pack("<ii3s", 1, 2, code),
    )  # fmt: skip
    table += descriptor(
        kind=0x4006, number=2, at=config_at, size=len(config), name=b"oci-config.json", extra=b""
    )
    data = header.ljust(4096, b"\0") + table
    path.write_bytes(data.ljust(offset, b"\0") + body + config)


@pytest.fixture
def images(tmp_path):
    store = ImageStore(tmp_path)
    return store, tmp_path


def check(store, name):
    return asyncio.run(store.check(name))


def test_what_is_checked_is_what_is_opened(images):
    store, path = images
    config = (
        b'{"Env": ["A=1", "PATH=/x", "broken", "=x"], "WorkingDir": "/w", "User": "me",'
        b' "Labels": {"k": "v"}}'
    )
    write_image(path / "team/image.v1.sif", config=config)
    image = check(store, "team/image.v1")
    assert (image.name, image.sif_offset) == ("team/image.v1", 36864)
    assert image.config.env == ("A=1", "PATH=/x")
    assert (image.config.workdir, image.config.user) == ("/w", "me")
    assert image.config.labels == {"k": "v"}
    fd = asyncio.run(store.open(image))
    assert os.pread(fd, 4, image.sif_offset) == b"hsqs"
    assert os.fstat(fd).st_ino == (path / "team/image.v1.sif").stat().st_ino
    os.close(fd)


def test_defaults_of_an_image_that_says_nothing(images):
    store, path = images
    write_image(path / "plain.sif")
    config = check(store, "plain").config
    assert (config.workdir, config.user) == ("/", "0")


def test_a_replaced_file_is_another_image(images, monkeypatch):
    store, path = images
    write_image(path / "a.sif")
    first = check(store, "a")
    write_image(path / "new.sif", payload=b"other")
    (path / "new.sif").rename(path / "a.sif")
    # Taken at its word for a while, but never opened as what it was.
    assert check(store, "a").key == first.key
    with pytest.raises(ImageUnavailable):
        asyncio.run(store.open(first))
    monkeypatch.setattr(store_module, "REVALIDATE_S", 0)
    assert check(store, "a").key != first.key


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/..",
        "../a",
        "/a",
        "a//b",
        "a/",
        ".a",
        "a/.b",
        "a\0b",
        "a\n",
        "ü",
        "a" * 300,
    ],
)
def test_names_that_are_none(images, name):
    store, _ = images
    with pytest.raises(ImageNotFound):
        check(store, name)


def test_what_is_not_there_or_no_file(images):
    store, path = images
    (path / "dir.sif").mkdir()
    os.mkfifo(path / "fifo.sif")
    (path / "loop.sif").symlink_to("loop.sif")
    (path / "file").write_bytes(b"")
    for name, kind in (
        ("none", ImageNotFound),
        ("file/below", ImageNotFound),
        ("dir", ImageInvalid),
        ("fifo", ImageInvalid),
        ("loop", ImageUnavailable),
    ):
        with pytest.raises(kind):
            check(store, name)


def test_a_symbolic_link_to_a_shared_store_is_followed(images, tmp_path_factory):
    store, path = images
    shared = tmp_path_factory.mktemp("shared") / "abc"
    write_image(shared)
    (path / "link.sif").symlink_to(shared)
    assert check(store, "link").name == "link"


def test_what_cannot_be_mounted_is_invalid_and_says_why(images):
    store, path = images
    (path / "junk.sif").write_bytes(b"junk" * 1000)
    write_image(path / "arch.sif", arch="386")
    write_image(path / "config.sif", config=b"[]")
    write_image(path / "cut.sif")
    os.truncate(path / "cut.sif", 40_000)
    for name, code in (
        ("junk", sif_tools.NotASif.code),
        ("arch", sif_tools.WrongArchitecture.code),
        ("config", sif_tools.BadImageConfig.code),
        ("cut", sif_tools.BadSif.code),
    ):
        with pytest.raises(ImageInvalid) as caught:
            check(store, name)
        assert caught.value.detail["sif_code"] == code, name


def test_the_list(images, monkeypatch):
    store, path = images
    for name in ("b.sif", "a/c.sif", "a/.hidden.sif", "a/readme", ".x/y.sif", "a/d.sif"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"12345")
    (path / "dir.sif").mkdir()
    known = asyncio.run(store.known())
    assert [(one.name, one.size_bytes) for one in known] == [("a/c", 5), ("a/d", 5), ("b", 5)]
    monkeypatch.setattr(store_module, "LIST_MAX", 2)
    assert len(asyncio.run(store.known())) == 2
    assert asyncio.run(ImageStore(path / "none").known()) == []


def test_a_store_that_is_away_is_the_nodes_fault(tmp_path):
    """Its images are not there for now; afterwards they are, and a wrong name is wrong again."""
    directory, away = tmp_path / "images", tmp_path / "away"
    write_image(directory / "one.sif")
    directory.rename(away)
    store = ImageStore(directory)
    with pytest.raises(ImageUnavailable) as refused:
        asyncio.run(store.check("one"))
    assert (refused.value.cause, refused.value.retryable) == ("node", True)
    away.rename(directory)
    assert asyncio.run(store.check("one")).name == "one"
    with pytest.raises(ImageNotFound):
        asyncio.run(store.check("two"))
