"""The mount wrappers do what they say, by the kernel's own account."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from sandboxd.linux import child, mount, namespaces
from sandboxd.linux.id_ranges import IdRange, map_ids
from tests.framework import times

pytestmark = pytest.mark.needs("userns", "namespaces")

TIMEOUT_S = times.scaled(10.0)
IDS = IdRange(2_000_000_000, 65_538)


@pytest.fixture
def place():
    """A directory that mapped ids may enter; pytest's own is for root only."""
    with tempfile.TemporaryDirectory(prefix="sandboxd-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def map_many(pid):
    map_ids(pid, IDS, IDS)


def privately(function):
    """Run it as root of a user namespace, in a mount namespace of its own."""
    flags = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS
    return child.run(function, TIMEOUT_S, flags, map_many)


def top_mount(path):
    return [m for m in mount.mountinfo() if m.mountpoint == str(path)][-1]


def test_mount_and_umount(place):
    def work():
        flags = mount.MS_NOSUID | mount.MS_NODEV | mount.MS_NOEXEC
        mount.mount("the source", place, "tmpfs", flags, "size=64k,mode=700")
        found = top_mount(place)
        (place / "file").write_text("x")
        mount.umount2(place, mount.MNT_DETACH)
        gone = not any(m.mountpoint == str(place) for m in mount.mountinfo())
        return [
            found.fstype,
            found.source,
            sorted(found.options & {"nosuid", "nodev", "noexec", "ro"}),
            "size=64k" in found.super_options,
            gone,
            os.listdir(place),
        ]

    expected = ["tmpfs", "the source", ["nodev", "noexec", "nosuid"], True, True, []]
    assert privately(work) == expected
    assert os.listdir(place) == []


def test_errors_name_the_call_and_its_object(place):
    with pytest.raises(FileNotFoundError) as caught:
        privately(lambda: mount.mount("tmpfs", place / "missing", "tmpfs"))
    assert str(place / "missing") in str(caught.value)
    with pytest.raises(OSError, match="no-such-fs") as caught:
        privately(lambda: mount.fsopen("no-such-fs"))
    assert caught.value.errno == errno.ENODEV


def test_a_file_system_by_descriptors(place):
    def work():
        options = {"size": "64k", "mode": "711", "nr_inodes": "10"}
        fd = mount.fs_context("tmpfs", options, mount.MOUNT_ATTR_NODEV)
        os.mkdir("made-while-detached", dir_fd=fd)
        mount.move_mount(fd, "", mount.AT_FDCWD, place, mount.MOVE_MOUNT_F_EMPTY_PATH)
        found = top_mount(place)
        return [
            os.get_inheritable(fd),
            os.listdir(place),
            oct(os.stat(place).st_mode & 0o777),
            "nodev" in found.options,
            {"size=64k", "nr_inodes=10"} <= found.super_options,
        ]

    assert privately(work) == [False, ["made-while-detached"], "0o711", True, True]


@pytest.mark.needs("overlay-detached")
def test_options_as_flags_descriptors_and_repeated_keys(place):
    """An overlay takes a flag, a key more than once, and (since Linux 6.13) a descriptor."""

    def work():
        os.chdir(place)
        mount.mount("tmpfs", ".", "tmpfs")
        os.chdir(place)
        for name in ("one", "two", "upper", "work"):
            os.mkdir(name)
            Path(name, name).touch()
        os.unlink("work/work")
        upper = os.open("upper", os.O_RDONLY | os.O_DIRECTORY)
        options = [
            ("userxattr", None),
            ("lowerdir+", "one"),
            ("lowerdir+", "two"),
            ("upperdir", upper),
            ("workdir", "work"),
        ]
        os.fchdir(mount.fs_context("overlay", options))
        return sorted(os.listdir("."))

    assert privately(work) == ["one", "two", "upper"]


def test_the_kernels_own_words_are_in_the_error():
    with pytest.raises(OSError, match="Unknown parameter 'no_such_option'") as caught:
        privately(lambda: mount.fs_context("tmpfs", {"no_such_option": "1"}))
    assert caught.value.errno == errno.EINVAL
    assert "tmpfs" in str(caught.value)


def test_a_failed_context_leaves_no_descriptor():
    def work():
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(OSError):
                mount.fs_context("tmpfs", {"no_such_option": "1"})
        return len(os.listdir("/proc/self/fd")) - len(before)

    assert privately(work) == 0


def test_a_cloned_tree_made_read_only(place):
    (place / "from").mkdir()
    (place / "from/file").write_text("x")
    (place / "to").mkdir()

    def work():
        flags = mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC
        fd = mount.open_tree(mount.AT_FDCWD, place / "from", flags)
        attributes = mount.MOUNT_ATTR_RDONLY | mount.MOUNT_ATTR_NOSUID
        mount.mount_setattr(fd, "", mount.AT_EMPTY_PATH, attr_set=attributes)
        target = place / "to"
        mount.move_mount(fd, "", mount.AT_FDCWD, target, mount.MOVE_MOUNT_F_EMPTY_PATH)
        try:
            os.open(target / "new", os.O_CREAT | os.O_WRONLY)
        except OSError as error:
            refused = error.errno
        return [refused, sorted(top_mount(target).options & {"ro", "nosuid"}), os.listdir(target)]

    assert privately(work) == [errno.EROFS, ["nosuid", "ro"], ["file"]]


def test_propagation_is_set(place):
    def work():
        mount.mount("tmpfs", place, "tmpfs")
        mount.mount_setattr(mount.AT_FDCWD, place, propagation=mount.MS_SHARED)
        shared = top_mount(place).propagation
        mount.mount(None, place, None, mount.MS_PRIVATE)
        return [shared[0].partition(":")[0], list(top_mount(place).propagation)]

    assert privately(work) == ["shared", []]


def test_pivot_root_and_an_odd_name(place):
    """Names with spaces, backslashes and newlines come through mountinfo as they are."""
    odd = "a b\\c\nd\té"

    def work():
        mount.mount("tmpfs", place, "tmpfs")
        os.chdir(place)
        os.mkdir("proc")
        os.mkdir(odd)
        mount.mount("/proc", "proc", None, mount.MS_REC | mount.MS_BIND)
        mount.mount("tmpfs", odd, "tmpfs")
        mount.pivot_root(".", ".")
        mount.umount2(".", mount.MNT_DETACH)
        os.chdir("/")
        points = [m.mountpoint for m in mount.mountinfo()]
        return [sorted(os.listdir("/")), f"/{odd}" in points, str(place) in points]

    assert privately(work) == [sorted(["proc", odd]), True, False]
