"""The library in squashfuse: what is read is what the kernel's own squashfs reads, and what was
asked once is not asked again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxd.launcher.image_server import PRELOAD
from sandboxd.linux import child, loop, mount, namespaces
from tests.framework import times

pytestmark = pytest.mark.needs("root", "loop", "fuse")

TIMEOUT_S = times.scaled(60.0)
FILES = 3000
"""More than the library keeps open."""
DIRECTORIES = 1500


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("keep")
    content = scratch / "content"
    noise = random.Random(7)
    for number in range(DIRECTORIES):
        (content / f"d{number % 40}/e{number}").mkdir(parents=True)
        (content / f"d{number % 40}/e{number}/link").symlink_to(f"../e{number}/nowhere{number}")
    for number in range(FILES):
        size = noise.choice((1, 2, 4095, 4096, 70_000)) if number % 100 else 400_000
        path = content / f"d{number % 40}/f{number}"
        path.write_bytes(noise.randbytes(size))
    os.setxattr(content / "d0/f0", "user.kept", b"value")
    made = scratch / "image"
    subprocess.run(["mksquashfs", content, made, "-quiet", "-no-progress"], check=True)
    return made


@contextlib.contextmanager
def served(image: Path, at: str, **environment: str) -> Iterator[int]:
    """squashfuse with the library; its pid."""
    command = ["squashfuse_ll", "-f", str(image), at]
    env = {"PATH": os.environ["PATH"], "LD_PRELOAD": str(PRELOAD), **environment}
    with subprocess.Popen(command, env=env) as server:
        try:
            device = os.stat("/").st_dev if at == "/" else os.stat(os.path.dirname(at)).st_dev
            while os.stat(at).st_dev == device:
                assert server.poll() is None
            yield server.pid
        finally:
            server.kill()
            with contextlib.suppress(OSError):
                mount.umount2(at, mount.MNT_DETACH)


def in_own_namespace(work):
    def inside():
        mount.mount("scratch", "/mnt", "tmpfs")
        for name in ("fuse", "kernel"):
            os.mkdir(f"/mnt/{name}")
        return work()

    return child.run(inside, TIMEOUT_S, namespaces.CLONE_NEWNS)


def requests(pid: int) -> int:
    """How often a server has read, which it does once for each request."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("syscr")).split()[1])


def look(root: str) -> str:
    """A digest of all there is: names, attributes, content, links."""
    digest = hashlib.sha256()
    for directory, names, files in os.walk(root):
        names.sort()
        for name in sorted([*names, *files]):
            path = f"{directory}/{name}"
            status = os.lstat(path)
            # A directory's size is what a file system calls it.
            size = status.st_size if name in files else 0
            digest.update(f"{path[len(root) :]} {status.st_mode} {size}".encode())
            digest.update(os.fsencode(os.readlink(path)) if os.path.islink(path) else b"")
            if name in files and not os.path.islink(path):
                digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def test_all_is_as_the_kernel_itself_reads_it_also_by_many_at_once(image: Path) -> None:
    def work():
        fd = os.open(image, os.O_RDONLY)
        device, holder = loop.attach_read_only(fd, 0)
        mount.mount(device, "/mnt/kernel", "squashfs", mount.MS_RDONLY)
        os.close(holder)
        with served(image, "/mnt/fuse"):
            with ThreadPoolExecutor(4) as pool:
                seen = set(pool.map(look, ["/mnt/fuse"] * 4))
            # Pieces, of files whose place another has taken meanwhile.
            for number in (0, 100, 2900, 100):
                for offset in (399_999, 131_072, 7):
                    pieces = []
                    for root in ("kernel", "fuse"):
                        with open(f"/mnt/{root}/d{number % 40}/f{number}", "rb") as file:
                            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                            pieces.append(os.pread(file.fileno(), 5000, offset))
                    assert pieces[0] == pieces[1] != b""
        found = [sorted(seen) == [look("/mnt/kernel")]]
        mount.umount2("/mnt/kernel", mount.MNT_DETACH)
        return found

    assert in_own_namespace(work) == [True]


def test_what_was_asked_once_is_not_asked_again(image: Path) -> None:
    def use() -> None:
        for number in range(3):
            # Not Python's open, which asks whether it is a terminal; overlayfs lets nobody ask.
            fd = os.open(f"/mnt/fuse/d{number}/f{number}", os.O_RDONLY)
            assert os.read(fd, 1 << 20)
            os.close(fd)
        assert len(os.listdir("/mnt/fuse/d7")) > 10
        assert os.readlink("/mnt/fuse/d7/e7/link") == "../e7/nowhere7"
        assert not os.path.exists("/mnt/fuse/d7/none")
        assert subprocess.run(["cat", "/mnt/fuse/d0/f0"], check=True, capture_output=True).stdout

    def work():
        with served(image, "/mnt/fuse") as pid:
            for _ in range(3):
                use()
            warm = requests(pid)
            for _ in range(10):
                use()
            return [warm > 20, requests(pid) - warm]

    assert in_own_namespace(work) == [True, 0]


def test_attributes_are_asked_for_unless_there_are_none(image: Path) -> None:
    def ask() -> str:
        try:
            return os.getxattr("/mnt/fuse/d0/f0", "user.kept").decode()
        except OSError as error:
            return errno.errorcode[error.errno]

    def work():
        told = []
        for environment in ({}, {"SANDBOXD_NO_XATTRS": "1"}):
            with served(image, "/mnt/fuse", **environment) as pid:
                told.append(ask())
                before = requests(pid)
                for _ in range(10):
                    ask()
                told.append(requests(pid) - before)
        return told

    assert in_own_namespace(work) == ["value", 10, "ENOTSUP", 0]


def test_it_does_no_harm_to_a_program_without_libfuse() -> None:
    """One that was linked statically, as some packages have squashfuse."""
    done = subprocess.run(
        ["/bin/true"], env={"LD_PRELOAD": str(PRELOAD)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_server_that_dies_is_noticed(image: Path) -> None:
    def work():
        with served(image, "/mnt/fuse") as pid:
            Path("/mnt/fuse/d0/f0").read_bytes()
            os.kill(pid, 9)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            try:
                os.statvfs("/mnt/fuse")
            except OSError as error:
                return error.errno
        return None

    assert in_own_namespace(work) == errno.ENOTCONN
