"""Squashfs that the kernel serves: owners as in the image, nothing to write or to gain, and which
files hostd lets come to that."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from sandboxd.host.images import NOT_TRUSTED, check_digest, check_file, check_offset
from sandboxd.linux import child, mount, namespaces, squashfs
from sandboxd.linux.id_ranges import IdRange, map_ids
from sif_tools import read_sif
from sif_tools.format import DataType
from tests.framework import images, times

pytestmark = pytest.mark.needs("root", "loop", "namespaces")

IDS = IdRange(2_000_000_000, 65_538)
PAST_THE_END = 1 << 20
TIMEOUT_S = times.scaled(20.0)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A squashfs from byte 4096 on, with a file of root's, with its set-user-ID bit, one of uid
    1000 and one of the last id."""
    content = tmp_path / "content"
    content.mkdir()
    for name, owner, mode in (("root", 0, 0o4755), ("user", 1000, 0o600), ("last", 65_535, 0o640)):
        (content / name).write_text(name)
        os.chown(content / name, owner, owner)
        (content / name).chmod(mode)
    made = tmp_path / "squashfs"
    subprocess.run(["mksquashfs", content, made, "-quiet", "-no-progress"], check=True)
    path = tmp_path / "image.sif"
    path.write_bytes(bytes(4096) + made.read_bytes())
    path.chmod(0o444)
    return path


def inside(image: Path, work, offset_bytes: int = 4096):
    """Run ``work`` with the image at /mnt in a user namespace like the node's."""
    fd = os.open(image, os.O_RDONLY)
    tree: list[int] = []

    def prepare(pid: int) -> None:
        map_ids(pid, IDS, IDS)
        user_ns = namespaces.open_namespace(pid, "user")
        os.write(write, b"%d" % user_ns)

    def look():
        flags = mount.MOVE_MOUNT_F_EMPTY_PATH
        mount.move_mount(tree[0], "", mount.AT_FDCWD, "/mnt", flags)
        os.chdir("/mnt")
        return work()

    read, write = os.pipe()
    holder = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS
    try:
        # The mount is made for a namespace with the same map; only maps count.
        with child.running(lambda: os.read(0, 1), namespaces.CLONE_NEWUSER, prepare):
            user_ns = int(os.read(read, 16))
            try:
                tree.append(squashfs.mount_idmapped(fd, offset_bytes, user_ns))
            finally:
                os.close(user_ns)
        return child.run(look, TIMEOUT_S, holder, lambda pid: map_ids(pid, IDS, IDS))
    finally:
        for one in (fd, read, write, *tree):
            os.close(one)


def test_owners_and_modes_are_those_of_the_image(image: Path) -> None:
    def work():
        found = [os.stat(name) for name in ("root", "user", "last", ".")]
        return [[s.st_uid, s.st_gid, s.st_mode & 0o7777] for s in found[:3]] + [found[3].st_uid]

    assert inside(image, work) == [
        [0, 0, 0o4755], [1000, 1000, 0o600], [65_535, 65_535, 0o640], 0,
    ]  # fmt: skip


def test_nothing_can_be_written_whatever_the_mount_says(image: Path) -> None:
    def refusals():
        found = []
        options = next(one.options for one in mount.mountinfo() if one.mountpoint == "/mnt")
        for _ in range(2):
            for call in (
                lambda: os.open("root", os.O_WRONLY),
                lambda: os.mkdir("new"),
                lambda: os.chown("root", 1, 1),
            ):
                try:
                    call()
                except OSError as error:
                    found.append(error.errno)
            # The mount is the node's own, which may do that; the file system stays as it is.
            mount.mount_setattr(mount.AT_FDCWD, "/mnt", attr_clr=mount.MOUNT_ATTR_RDONLY)
        return [found, sorted({"ro", "nosuid", "nodev"} & options)]

    assert inside(image, refusals) == [[errno.EROFS] * 6, ["nodev", "nosuid", "ro"]]


@pytest.mark.parametrize("offset", [1, 0, PAST_THE_END])
def test_what_is_no_file_system_is_refused_and_leaves_no_device(image: Path, offset: int) -> None:
    with pytest.raises(OSError) as caught:
        inside(image, lambda: None, offset)
    assert caught.value.errno == (errno.EIO if offset == PAST_THE_END else errno.EINVAL)
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            assert device.read_text().strip() != str(image)
        except OSError:
            continue  # just detached: somebody else's


def refusal(
    path: Path, mode: int = os.O_RDONLY, images_dir: Path | None = None, digest: str = "image"
) -> str | None:
    fd = os.open(path, mode)
    try:
        check_file(fd, str(images_dir or path.parent), digest)
    except OSError as error:
        return error.strerror if error.errno == NOT_TRUSTED else None
    else:
        return None
    finally:
        os.close(fd)


def test_a_file_that_only_root_can_change_is_taken_and_no_other(image: Path) -> None:
    assert refusal(image) is None
    os.chown(image, 1000, 0)
    assert "uid 1000" in str(refusal(image))
    os.chown(image, 0, 1000)
    assert refusal(image) is None
    image.chmod(0o464)
    assert "0464" in str(refusal(image))
    image.chmod(0o446)
    assert "0446" in str(refusal(image))
    image.chmod(0o444)
    assert "open for writing" in str(refusal(image, os.O_RDWR))
    writer = os.open(image, os.O_WRONLY)
    try:
        assert "open for writing" in str(refusal(image))
    finally:
        os.close(writer)
    assert refusal(image) is None


def test_no_directory_and_no_file_of_a_file_system_that_others_may_change(tmp_path: Path) -> None:
    assert "regular" in str(refusal(tmp_path))
    assert "file system" in str(refusal(Path("/proc/sys/kernel/ostype")))


def test_no_file_of_roots_that_lies_elsewhere(image: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "link").symlink_to(image)
    beside = tmp_path / "store-of-another"
    beside.mkdir()
    (beside / "image.sif").write_bytes(image.read_bytes())
    for path in (image, store / "link", beside / "image.sif"):
        assert "directory" in str(refusal(path, images_dir=store))
    os.link(image, store / "image.sif")
    assert refusal(store / "image.sif", images_dir=store) is None
    (tmp_path / "alias").symlink_to(store)
    assert refusal(tmp_path / "alias/image.sif", images_dir=tmp_path / "alias") is None


def test_no_file_that_has_another_name_than_its_digest(image: Path, tmp_path: Path) -> None:
    """Of what lies among the images only a store's objects were made by sif-tools."""
    assert "its digest" in str(refusal(image, digest="imag"))
    os.link(image, tmp_path / "blob")
    assert "its digest" in str(refusal(tmp_path / "blob"))
    fd = os.open(image, os.O_RDONLY)
    try:
        image.unlink()  # the store's collector, meanwhile
        (tmp_path / "blob").unlink()
        check_file(fd, str(tmp_path), "image")
    finally:
        os.close(fd)


def test_no_other_part_of_an_image_than_its_partitions(tmp_path: Path) -> None:
    """Files of a task image that do not compress lie in its SIF as they are."""
    busybox = images.busybox_image()
    with busybox.open("rb") as sif:
        rows = read_sif(sif.fileno()).descriptors
        begins = [row.offset_bytes for row in rows if row.data_type == DataType.PARTITION]
        others = [row.offset_bytes for row in rows if row.data_type != DataType.PARTITION]
        assert begins
        assert others
        for offset in begins:
            check_offset(sif.fileno(), offset)
        for offset in (*others, begins[0] + 4096, 0, -1, 1 << 80):
            with pytest.raises(OSError, match="partitions") as caught:
                check_offset(sif.fileno(), offset)
            assert caught.value.errno == NOT_TRUSTED
    # What is no SIF, or says that its table is elsewhere than it is.
    head = bytearray(busybox.read_bytes()[:8192])
    for at, value in ((32, b"X"), (95, b"\xff"), (102, b"\x7f"), (103, b"\xff")):
        (tmp_path / "broken").write_bytes(head[:at] + value + head[at + 1 :])
        with (tmp_path / "broken").open("rb") as sif, pytest.raises(OSError, match="partitions"):
            check_offset(sif.fileno(), begins[0])


def test_the_digest_is_that_of_all_bytes(image: Path) -> None:
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    fd = os.open(image, os.O_RDONLY)
    try:
        os.lseek(fd, 100, os.SEEK_SET)
        check_digest(fd, digest)
        with pytest.raises(OSError, match=digest[:12]) as caught:
            check_digest(fd, digest[:-1] + ("0" if digest[-1] != "0" else "1"))
        assert caught.value.errno == NOT_TRUSTED
    finally:
        os.close(fd)
