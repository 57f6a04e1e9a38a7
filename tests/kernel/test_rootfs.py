"""Roots as ``rootfs.overlay`` makes them: what they hold, and exactly how much."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from sandboxd.linux import child, mount, namespaces
from sandboxd.linux.id_ranges import IdRange, map_ids
from sandboxd.rootfs import overlay
from tests.framework import times

pytestmark = pytest.mark.needs("userns", "namespaces", "overlay-tmpfs", "overlay-detached")

TIMEOUT_S = times.scaled(60.0)
IDS = IdRange(2_000_000_000, 65_538)
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="sandboxd-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def in_a_root(place: Path, work, *, lowers=("low",), size_bytes=1 << 24, inodes=1000):
    """Run ``work`` in the root, whose lowers are directories made by ``fill``."""

    def inside():
        mount.mount("images", place, "tmpfs", 0, "mode=755")
        for name in lowers:
            fill(place / name, name)
        images_fd = os.open(place, os.O_PATH | os.O_DIRECTORY)
        overlay_fd, tmpfs_fd = overlay.make_root(images_fd, lowers, size_bytes, inodes)
        where = place / "root"
        where.mkdir()
        mount.move_mount(overlay_fd, "", mount.AT_FDCWD, where, mount.MOVE_MOUNT_F_EMPTY_PATH)
        os.chdir(where)
        return work(tmpfs_fd)

    flags = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS
    return child.run(inside, TIMEOUT_S, flags, lambda pid: map_ids(pid, IDS, IDS))


def fill(directory: Path, name: str) -> None:
    (directory / "d/below").mkdir(parents=True)
    (directory / "d/same").write_text(name)
    (directory / f"d/only-{name}").write_text(name)
    (directory / "big").write_bytes(bytes(64 * 1024))


def count_until(limit: int, make) -> tuple[int, int]:
    """How often ``make(i)`` succeeds, and the errno that ended it."""
    for i in range(limit):
        try:
            make(i)
        except OSError as error:
            return i, error.errno or 0
    return limit, 0


def touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


@pytest.mark.parametrize("inodes", [16, 1000])
def test_as_many_files_as_promised_and_not_one_more(place, inodes):
    def work(_):
        return count_until(inodes + 50, lambda i: touch(f"f{i}"))

    assert in_a_root(place, work, inodes=inodes) == [inodes, errno.ENOSPC]


def test_a_removed_file_makes_room_for_another(place):
    def work(_):
        count_until(100, lambda i: touch(f"f{i}"))
        os.unlink("f0")
        return count_until(2, lambda i: touch(f"g{i}"))

    assert in_a_root(place, work, inodes=20) == [1, errno.ENOSPC]


@pytest.mark.parametrize("size_bytes", [1 << 20, (1 << 20) + 1, 16 << 20])
def test_as_many_bytes_as_promised_and_not_a_page_more(place, size_bytes):
    def work(_):
        fd = os.open("f", os.O_CREAT | os.O_WRONLY)
        return count_until(size_bytes // PAGE + 50, lambda _: os.write(fd, bytes(PAGE)))

    promised = -(-size_bytes // PAGE)
    assert in_a_root(place, work, size_bytes=size_bytes) == [promised, errno.ENOSPC]


def test_a_full_root_can_still_be_emptied(place):
    def work(_):
        fd = os.open("f", os.O_CREAT | os.O_WRONLY)
        count_until(1000, lambda _: os.write(fd, bytes(PAGE)))
        os.close(fd)
        os.unlink("f")
        os.unlink("big")  # of the image: a whiteout, which takes an inode and no page
        return os.listdir(".")

    assert in_a_root(place, work, size_bytes=1 << 20) == ["d"]


def test_a_file_of_the_image_is_copied_up_whole_or_not_at_all(place):
    def work(_):
        fd = os.open("big", os.O_WRONLY)
        os.pwrite(fd, b"x", 0)
        os.close(fd)
        data = Path("big").read_bytes()
        return [len(data), data[0], Path("../low/big").read_bytes()[0]]

    assert in_a_root(place, work) == [64 * 1024, ord("x"), 0]

    def too_small(_):
        try:
            os.close(os.open("big", os.O_WRONLY))
        except OSError as error:
            return [error.errno, len(Path("big").read_bytes())]
        return None

    assert in_a_root(place, too_small, size_bytes=8 * PAGE) == [errno.ENOSPC, 64 * 1024]


def test_a_directory_of_the_image_can_be_removed_and_made_again(place):
    def work(_):
        for name in ("d/same", "d/only-low"):
            os.unlink(name)
        os.rmdir("d/below")
        os.rmdir("d")
        gone = os.path.exists("d")
        os.mkdir("d")
        return [gone, os.listdir("d"), sorted(os.listdir("../low/d"))]

    assert in_a_root(place, work) == [False, [], ["below", "only-low", "same"]]


def test_the_first_lower_is_the_highest(place):
    def work(_):
        os.unlink("d/only-b")
        return [Path("d/same").read_text(), sorted(os.listdir("d"))]

    found = in_a_root(place, work, lowers=("c", "b", "a"))
    assert found == ["c", ["below", "only-a", "only-c", "same"]]


def test_mountinfo_tells_nothing_of_where_things_are(place):
    def work(_):
        line = [m for m in mount.mountinfo() if m.fstype == "overlay"][-1]
        return sorted(str(option) for option in line.super_options)

    options = in_a_root(place, work, lowers=("b", "a"))
    assert not [option for option in options if "/" in option]
    assert {"lowerdir+=b", "lowerdir+=a", "upperdir=u", "workdir=w", "userxattr"} <= set(options)


def test_the_top_of_a_root_is_roots(place):
    def work(tmpfs_fd):
        upper = os.stat(overlay.UPPER, dir_fd=tmpfs_fd)
        top = os.stat(".")
        return [top.st_uid, top.st_gid, top.st_mode & 0o7777, upper.st_uid]

    assert in_a_root(place, work) == [0, 0, 0o755, 0]


def test_a_missing_lower_is_named_and_leaves_no_fd(place):
    def inside():
        mount.mount("images", place, "tmpfs", 0, "mode=755")
        images_fd = os.open(place, os.O_PATH | os.O_DIRECTORY)
        before = os.listdir("/proc/self/fd")
        try:
            overlay.make_root(images_fd, ["nothing"], 1 << 20, 100)
        except OSError as error:
            same = len(os.listdir("/proc/self/fd")) == len(before)
            return [error.errno, same, os.getcwd()]
        return None

    flags = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS
    found = child.run(inside, TIMEOUT_S, flags, lambda pid: map_ids(pid, IDS, IDS))
    assert found == [errno.ENOENT, True, "/"]
