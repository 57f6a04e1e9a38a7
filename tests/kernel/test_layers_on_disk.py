"""Writable layers that the host makes: an ext4 on a loop device, of exactly the promised size."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from sandboxd.host.layers import LoopLayers
from sandboxd.linux import child, mount, namespaces
from sandboxd.linux.id_ranges import IdRange, map_ids
from sandboxd.rootfs import overlay
from tests.framework import times

pytestmark = pytest.mark.needs("root", "loop", "overlay")

IDS = IdRange(2_000_000_000, 65_538)
MIB = 1 << 20
TIMEOUT_S = times.scaled(60.0)


@pytest.fixture
def directory():
    # Not on a tmpfs, if /tmp is one: a loop device's file is to be on disk.
    with tempfile.TemporaryDirectory(prefix="sandboxd-test-", dir="/var/tmp") as name:
        os.chmod(name, 0o755)
        yield name


def in_a_root(directory: str, work, size_bytes=16 * MIB, inodes=1000):
    """Run ``work`` in a root over one lower, as the mounter makes it of attached layers."""
    layer_fd = LoopLayers(directory, IDS.first).make(size_bytes, inodes)

    def inside():
        images = Path(directory)
        mount.mount("images", images, "tmpfs", 0, "mode=755")
        (images / "low/d").mkdir(parents=True)
        (images / "low/d/f").write_text("low")
        (images / "w1").mkdir()
        flags = mount.MOVE_MOUNT_F_EMPTY_PATH
        mount.move_mount(layer_fd, "", mount.AT_FDCWD, images / "w1", flags)
        before = sorted(os.listdir(images))
        overlay_fd = overlay.make_overlay_of_attached(directory, ["low"], "w1")
        assert sorted(os.listdir(images)) == before
        (images / "root").mkdir()
        mount.move_mount(overlay_fd, "", mount.AT_FDCWD, images / "root", flags)
        os.chdir(images / "root")
        return work()

    try:
        flags = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS
        return child.run(inside, TIMEOUT_S, flags, lambda pid: map_ids(pid, IDS, IDS))
    finally:
        os.close(layer_fd)


def fill(size: int) -> tuple[int, int]:
    """Write until it ends: bytes, and the errno that ended it."""
    fd = os.open("f", os.O_CREAT | os.O_WRONLY)
    done = 0
    try:
        while done < 2 * size:
            done += os.write(fd, bytes(4096))
            # Allocated now: until then blocks are only promised.
            if done % MIB == 0:
                os.fsync(fd)
    except OSError as error:
        return done, error.errno or 0
    finally:
        os.close(fd)
    return done, 0


@pytest.mark.parametrize("size", [MIB, 5 * MIB + 4096, 64 * MIB])
def test_as_many_bytes_as_promised_and_not_a_block_more(directory, size):
    assert in_a_root(directory, lambda: fill(size), size_bytes=size) == [size, errno.ENOSPC]


@pytest.mark.parametrize("inodes", [16, 1000, 5000])
def test_as_many_files_as_promised_and_not_one_more(directory, inodes):
    def work():
        try:
            for number in range(2 * inodes):
                os.close(os.open(f"f{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except OSError as error:
            return [number, error.errno]
        return None

    assert in_a_root(directory, work, inodes=inodes) == [inodes, errno.ENOSPC]


def test_a_directory_of_the_image_is_removed_and_made_again(directory):
    def work():
        os.unlink("d/f")
        os.rmdir("d")
        os.mkdir("d")
        return [os.listdir("d"), os.listdir("../low/d")]

    assert in_a_root(directory, work) == [[], ["f"]]


def test_owners_and_attributes(directory):
    def work():
        Path("own").touch()
        os.chown("own", 1000, 65_535)
        os.chmod("own", 0o4750)
        os.setxattr("own", "user.test", b"value")
        found = os.stat("own")
        return [found.st_uid, found.st_gid, found.st_mode & 0o7777, os.stat(".").st_uid]

    assert in_a_root(directory, work) == [1000, 65_535, 0o4750, 0]


def test_no_room_on_the_disk_is_told_when_it_is_made(directory):
    """And not when a sandbox writes to what it was promised."""
    free = os.statvfs(directory)
    more = (free.f_bavail + 1000) * free.f_frsize
    with pytest.raises(OSError) as caught:
        LoopLayers(directory, IDS.first).make(more, 1000)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(directory) == []


def test_two_of_one_template_are_two_file_systems(directory):
    """With one UUID overlayfs would take them for the same, as lowers of one stack."""
    layers = LoopLayers(directory, IDS.first)
    fds = [layers.make(MIB, 16) for _ in range(2)]
    try:
        os.mkdir("one", dir_fd=fds[0])
        assert "one" not in _names(fds[1])
        assert os.fstatvfs(fds[0]).f_fsid != os.fstatvfs(fds[1]).f_fsid
    finally:
        for fd in fds:
            os.close(fd)


def _names(mount_fd: int) -> list[str]:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount_fd)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)
