"""The leak check finds what is left, waits for what is going, and lets a daemon replace workers.

Leaks are made here on purpose, so none of this runs under the check it tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework import host_state, leaks
from tests.framework.host_state import Thing
from tests.framework.leaks import Leak, LeakCheck


@pytest.fixture
def check(tmp_path: Path) -> LeakCheck:
    # A shared host: whatever else goes on here while the tests of this file run is not their leak.
    return LeakCheck(shared_host=True, settle_s=0.2, directories={tmp_path})


@pytest.fixture
def wide_check() -> LeakCheck:
    """Of the whole host: where others make and end things meanwhile, these may stand for ours."""
    if os.environ.get("SANDBOXD_TESTS_SHARED_HOST") == "1":
        pytest.skip("others work on this host")
    return LeakCheck(settle_s=0.2)


@contextlib.contextmanager
def leaked(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_things_of_one_kind_replace_each_other() -> None:
    before = {"processes": frozenset({Thing("worker 1", "worker"), Thing("other 2")})}
    same = {"processes": frozenset({Thing("worker 3", "worker"), Thing("other 2")})}
    more = {"processes": same["processes"] | {Thing("worker 4", "worker")}}
    assert leaks.compare(before, same) == {}
    assert leaks.compare(before, more) == {"processes": ["worker 3", "worker 4"]}


def test_without_a_kind_only_the_same_thing_counts() -> None:
    before = {"mounts": frozenset({Thing("on /a")})}
    assert leaks.compare(before, {"mounts": frozenset({Thing("on /b")})}) == {"mounts": ["on /b"]}
    assert leaks.compare(before, {"mounts": frozenset()}) == {}


def test_allowed_things_are_no_leak() -> None:
    after = {"mounts": frozenset({Thing("fuse.squashfuse on /x"), Thing("tmpfs on /y")})}
    assert leaks.compare({}, after, ("squashfuse",)) == {"mounts": ["tmpfs on /y"]}


def test_nothing_left_is_no_leak(check: LeakCheck) -> None:
    with check.around("nothing"):
        subprocess.run(["true"], check=True)


def test_a_process_is_named(check: LeakCheck) -> None:
    with contextlib.ExitStack() as stack:
        with pytest.raises(Leak, match=r"processes:\n    sleep pid \d+") as caught:
            with check.around("a test"):
                process = stack.enter_context(leaked("sleep", "60"))
        assert str(process.pid) in str(caught.value)


def test_a_process_that_ends_soon_is_waited_for() -> None:
    check = LeakCheck(shared_host=True, settle_s=10)
    with check.around("a test"), contextlib.ExitStack() as stack:
        process = subprocess.Popen(["sleep", "0.3"])
        stack.callback(setattr, process, "returncode", 0)  # the check itself reaps it


def test_an_orphan_is_found(check: LeakCheck) -> None:
    orphan_maker = (
        "import os, sys\nif os.fork() == 0:\n os.setsid()\n os.execlp('sleep', 'sleep', '60')"
    )
    outer = f"""
import os, signal, subprocess, sys
from tests.framework import host_state, leaks
leaks.become_subreaper()
check = leaks.LeakCheck(shared_host=True, settle_s=0.2, directories=set())
try:
    with check.around("a test"):
        subprocess.run([sys.executable, "-c", {orphan_maker!r}], check=True)
except leaks.Leak as leak:
    print(leak)
for orphan in host_state.process_table()[os.getpid()].children:
    os.kill(orphan.pid, signal.SIGKILL)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", outer], capture_output=True, text=True, check=True, cwd=root
    )
    assert "sleep pid " in done.stdout


def test_an_open_file_is_named(check: LeakCheck, tmp_path: Path) -> None:
    file = tmp_path / "open"
    file.touch()
    descriptors = []
    try:
        with pytest.raises(Leak, match=r"fds:\n    fd \d+ of tests .*/open"):
            with check.around("a test"):
                descriptors.append(os.open(file, os.O_RDONLY))
    finally:
        os.close(descriptors[0])


def test_a_file_in_a_watched_directory_is_named(check: LeakCheck, tmp_path: Path) -> None:
    with pytest.raises(Leak, match="left-over"), check.around("a test"):
        (tmp_path / "left-over").touch()


def test_a_failing_block_keeps_its_own_exception(check: LeakCheck, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), check.around("a test"):
        (tmp_path / "left-over").touch()
        _ = 1 / 0


def test_a_daemon_may_replace_its_workers_but_not_collect_them() -> None:
    daemon = "import subprocess, sys\nfor line in sys.stdin: exec(line); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", daemon], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None

        def tell(line: str) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            print(line, file=process.stdin, flush=True)
            process.stdout.readline()

        check = LeakCheck(shared_host=True, settle_s=0.2, directories=set())
        with check.long_lived({process.pid}, set()):
            start = "w = subprocess.Popen(['sleep', '60'])"
            stop = "w.kill(); w.wait()"
            tell(start)
            with check.around("replacing"):
                tell(f"{stop}; {start}")
            with pytest.raises(Leak, match="sleep"), check.around("collecting"):
                tell(f"v = w; {start}")
        tell(f"{stop}; w = v; {stop}")
        process.stdin.close()


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("category", "make", "undo"),
    [
        ("mounts", "mount -t tmpfs none {dir}", "umount {dir}"),
        ("links", "ip link add sbxleak0 type veth peer name sbxleak1", "ip link del sbxleak0"),
        (
            "routes",
            "ip route add unreachable 192.0.2.77/32",
            "ip route del unreachable 192.0.2.77/32",
        ),
        ("namespaces", "", ""),
        ("nft tables", "nft add table inet sbxleak", "nft delete table inet sbxleak"),
        (
            "loop devices",
            "truncate -s 1M {dir}/f; losetup -f {dir}/f",
            "losetup -j {dir}/f | cut -d: -f1 | xargs losetup -d",
        ),
    ],
)
def test_a_change_of_the_host_is_named(
    wide_check: LeakCheck, tmp_path: Path, category: str, make: str, undo: str
) -> None:
    def shell(script: str) -> None:
        subprocess.run(["sh", "-euc", script.format(dir=tmp_path)], check=True)

    with contextlib.ExitStack() as stack:
        with pytest.raises(Leak) as caught, wide_check.around("a test"):
            if category == "namespaces":
                holder = stack.enter_context(leaked("unshare", "--net", "sleep", "60"))
                _wait_for_other_netns(holder.pid)
            else:
                stack.callback(shell, undo)
                shell(make)
        assert f"  {category}:" in str(caught.value)


def _wait_for_other_netns(pid: int) -> None:
    mine = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == mine:
        os.sched_yield()


@pytest.mark.needs("cgroup-limits")
def test_a_cgroup_is_named(wide_check: LeakCheck) -> None:
    made = []
    try:
        with pytest.raises(Leak, match=r"(?s)cgroups:\n    .*sandboxd-leak"):
            with wide_check.around("a test"):
                mount = host_state.cgroup_mounts()[-1]
                made.append(tempfile.mkdtemp(prefix="sandboxd-leak-", dir=mount))
    finally:
        os.rmdir(made[0])


@pytest.mark.needs("fuse")
def test_a_fuse_connection_in_another_namespace_is_named(
    wide_check: LeakCheck, tmp_path: Path
) -> None:
    mksquashfs, squashfuse = shutil.which("mksquashfs"), shutil.which("squashfuse_ll")
    image, mountpoint = tmp_path / "image", tmp_path / "mnt"
    mountpoint.mkdir()
    subprocess.run(
        [str(mksquashfs), str(mountpoint), str(image), "-quiet", "-no-progress"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with contextlib.ExitStack() as stack:
        with pytest.raises(Leak, match=r"FUSE connections:\n    connection \d+"):
            with wide_check.around("a test"):
                command = ["unshare", "--mount", str(squashfuse), "-f", str(image), str(mountpoint)]
                server = stack.enter_context(leaked(*command))
                while f" {mountpoint} " not in Path(f"/proc/{server.pid}/mountinfo").read_text():
                    assert server.poll() is None
