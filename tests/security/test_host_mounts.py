"""A mount of the host's files is no way to more of the host than what it was given for.

The host's side (sources that are changed under way, that lead elsewhere, that are no files) is
tried without a daemon too, as what opens them is one function; the sandbox's side from within.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxd.host.mounts import open_mount
from sandboxd.linux import mount as kernel
from sandboxd.model import MountRoot
from tests.framework import times
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

SWAPS = 400
EUID = b"""
#include <stdio.h>
#include <unistd.h>
int main(void) { return printf("%d\\n", geteuid()) < 0; }
"""


@pytest.fixture(scope="module")
def host_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("host")
    (base / "root" / "data").mkdir(parents=True)
    (base / "root" / "data" / "file").write_text("inside\n")
    (base / "outside").mkdir()
    (base / "outside" / "file").write_text("outside\n")
    (base / "root" / "link").symlink_to("data")
    (base / "root" / "out").symlink_to(base / "outside")
    os.mkfifo(base / "root" / "fifo")
    os.mknod(base / "root" / "null", 0o666 | 0o020000, os.makedev(1, 3))
    os.mknod(base / "root" / "data" / "null", 0o666 | 0o020000, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as bound:
        at = os.open(base / "root", os.O_PATH)
        bound.bind(f"/proc/self/fd/{at}/socket")
        os.close(at)
    return base


@pytest.fixture(scope="module")
def mounting(
    daemon: Daemon,  # the run's own, before this one: or it would count as left behind by it
    leak_check: LeakCheck,
    busybox: Path,
    host_files: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Daemon]:
    del daemon
    source = tmp_path_factory.mktemp("setuid") / "euid"
    subprocess.run(["gcc", "-static", "-x", "c", "-o", source, "-"], input=EUID, check=True)
    target = host_files / "root" / "data" / "euid"
    target.write_bytes(source.read_bytes())
    target.chmod(0o4755)
    settings = {"SANDBOXD_MOUNT_ROOTS": f"{host_files}/root"}
    with running_daemon(leak_check, {"busybox": busybox}, (), settings) as started:
        started.warm_up("busybox")
        yield started


def refusal(daemon: Daemon, source: Path | str, target: str = "/mnt", **more: Any) -> str:
    body = {"image": "busybox", "mounts": [{"source": str(source), "target": target, **more}]}
    answer = daemon.http.post("/v1/sandboxes", json=body)
    assert not answer.is_success, answer.text
    error = answer.json()["error"]
    assert error["cause"] == "request"
    assert error["retryable"] is False
    return str(error["code"])


def test_only_what_lies_below_a_root(mounting: Daemon, host_files: Path) -> None:
    root = host_files / "root"
    assert refusal(mounting, host_files / "outside") == "mount-not-allowed"
    assert refusal(mounting, host_files) == "mount-not-allowed"
    assert refusal(mounting, "/etc") == "mount-not-allowed"
    assert refusal(mounting, f"{root}side") == "mount-not-allowed"
    assert refusal(mounting, f"{root}/../outside") == "request-invalid"
    assert refusal(mounting, f"{root}/data/../../outside") == "request-invalid"
    assert refusal(mounting, "/") == "request-invalid"
    assert refusal(mounting, root / "data", read_only=False) == "mount-not-allowed"
    assert refusal(mounting, root / "none") == "mount-source-not-found"
    assert refusal(mounting, root / "data" / "file" / "x") == "mount-source-not-found"
    for name in ("link", "out", "out/file", "fifo", "null", "socket"):
        assert refusal(mounting, root / name) == "mount-source-invalid", name
    for source in (root, root / "data", root / "data" / "file"):  # the control
        with mounting.sandbox("busybox", mounts=[{"source": str(source), "target": "/mnt"}]):
            pass


def test_a_node_without_roots_mounts_nothing(daemon: Daemon, host_files: Path) -> None:
    assert refusal(daemon, host_files / "root") == "mount-not-allowed"


def test_targets(mounting: Daemon, host_files: Path) -> None:
    source = host_files / "root" / "data"
    for target in ("/", "/proc", "/proc/sys", "/sys/x", "/dev/shm", "/a/../proc", "mnt", "/./proc"):
        assert refusal(mounting, source, target) == "request-invalid", target
    both = [{"source": str(source), "target": one} for one in ("/mnt", "/mnt/data")]
    answer = mounting.http.post("/v1/sandboxes", json={"image": "busybox", "mounts": both})
    assert answer.json()["error"]["code"] == "request-invalid"
    # The image has a directory there, and a file here.
    assert refusal(mounting, source / "file", "/etc") == "mount-target-invalid"
    assert refusal(mounting, source, "/bin/busybox") == "mount-target-invalid"


@pytest.mark.parametrize("link", ["/data", "/data/below"])
def test_a_snapshot_with_a_symlink_for_a_target(
    mounting: Daemon, host_files: Path, link: str
) -> None:
    """What a sandbox has made of the place is not followed, neither by a rollback nor by a fork."""
    mounts = [{"source": str(host_files / "root" / "data"), "target": "/data/below/it"}]
    with mounting.sandbox("busybox", mounts=mounts) as sandbox:
        url = f"/v1/sandboxes/{sandbox}"
        with mounting.sandbox("busybox") as other:
            script = f"mkdir -p $(dirname {link}); ln -s /etc {link}"
            mounting.exec(other, script)
            answer = mounting.http.post(f"/v1/sandboxes/{other}/snapshots", json={})
            snapshot = answer.json()["id"]
        for body in ({"snapshot": snapshot, "mounts": mounts},):
            error = mounting.http.post("/v1/sandboxes", json=body).json()["error"]
            assert (error["code"], error["cause"]) == ("mount-target-invalid", "request")
        reset = mounting.http.post(f"{url}/reset", json={"snapshot": snapshot})
        assert reset.json()["error"]["code"] == "mount-target-invalid"
        assert mounting.http.delete(f"/v1/snapshots/{snapshot}").is_success


def test_its_own_place_moved_away_before_a_snapshot(mounting: Daemon, host_files: Path) -> None:
    mounts = [{"source": str(host_files / "root" / "data"), "target": "/a/b"}]
    with mounting.sandbox("busybox", mounts=mounts) as sandbox:
        url = f"/v1/sandboxes/{sandbox}"
        mounting.exec(sandbox, "mv /a /moved; ln -s /etc /a")
        error = mounting.http.post(f"{url}/snapshots", json={}).json()["error"]
        assert (error["code"], error["cause"]) == ("mount-target-invalid", "request")
        assert mounting.exec(sandbox, "cat /moved/b/file")["stdout"] == "inside\n"
        mounting.exec(sandbox, "rm /a; mkdir /a; echo x > /a/b")
        error = mounting.http.post(f"{url}/snapshots", json={}).json()["error"]
        assert (error["code"], error["cause"]) == ("mount-target-invalid", "request")
        mounting.exec(sandbox, "rm -r /a")
        taken = mounting.http.post(f"{url}/snapshots", json={})
        assert taken.is_success, taken.text
        assert mounting.exec(sandbox, "cat /a/b/file")["stdout"] == "inside\n"
        assert mounting.http.delete(f"/v1/snapshots/{taken.json()['id']}").is_success


def test_nothing_on_it_gives_a_right(mounting: Daemon, host_files: Path) -> None:
    """No setuid bit, no device, no write, and no way to remount it."""
    mounts = [{"source": str(host_files / "root" / "data"), "target": "/mnt"}]
    with mounting.sandbox("busybox", mounts=mounts) as sandbox:
        options = mounting.exec(sandbox, "grep ' /mnt ' /proc/self/mountinfo")["stdout"].split()
        assert {"ro", "nosuid", "nodev"} <= set(options[5].split(","))
        assert not any(word.startswith(("shared:", "master:")) for word in options[6:])
        told = mounting.exec(sandbox, "stat -c %a /mnt/euid; /mnt/euid", user="1234")["stdout"]
        assert told == "4755\n1234\n"
        for who in ("root", "agent"):
            script = (
                "cat /mnt/null; mount -o remount,rw /mnt; mount -o remount,bind,rw /mnt; "
                "mount -o remount,suid,dev /mnt; umount /mnt; umount -l /mnt; echo x > /mnt/file; "
                "rm -f /mnt/file; touch /mnt/new; chmod 777 /mnt; mv /mnt /gone"
            )
            done = mounting.exec(sandbox, script, user=who)
            assert "Permission denied" in done["stderr"], done  # of the device
            assert mounting.exec(sandbox, "cat /mnt/file")["stdout"] == "inside\n"
            after = mounting.exec(sandbox, "grep ' /mnt ' /proc/self/mountinfo")["stdout"].split()
            assert after == options
    assert sorted(os.listdir(host_files / "root" / "data")) == ["euid", "file", "null"]


def test_what_a_sandbox_learns_of_the_host(mounting: Daemon, host_files: Path) -> None:
    """The path within its file system, that one's type and device, and nothing above."""
    mounts = [{"source": str(host_files / "root" / "data"), "target": "/mnt"}]
    with mounting.sandbox("busybox", mounts=mounts) as sandbox:
        text = mounting.exec(sandbox, "cat /proc/self/mountinfo /proc/self/mounts")["stdout"]
        told = [line for line in text.splitlines() if str(host_files) in line]
        whole = os.stat("/").st_dev == os.stat(host_files).st_dev
        assert len(told) == (1 if whole else 0), told
        line = mounting.exec(sandbox, "grep ' /mnt ' /proc/self/mountinfo")["stdout"]
        assert str(host_files / "root" / "data").endswith(line.split()[3])
        assert mounting.exec(sandbox, "ls -a /mnt/..")["stdout"].count("outside") == 0


def test_a_mount_that_the_host_makes_later_stays_out(mounting: Daemon, host_files: Path) -> None:
    inner = host_files / "root" / "inner"
    (inner / "sub").mkdir(parents=True)
    (inner / "sub" / "under").write_text("under\n")
    kernel.mount("x", inner / "sub", "tmpfs", kernel.MS_NOSUID)
    try:
        (inner / "sub" / "over").write_text("over\n")
        mounts = [{"source": str(inner), "target": "/mnt"}]
        with mounting.sandbox("busybox", mounts=mounts) as sandbox:
            assert mounting.exec(sandbox, "ls /mnt/sub")["stdout"] == "under\n"
            kernel.mount("y", inner / "sub", "tmpfs", kernel.MS_NOSUID)
            kernel.umount2(inner / "sub")
            assert mounting.exec(sandbox, "ls /mnt/sub")["stdout"] == "under\n"
    finally:
        kernel.umount2(inner / "sub")


def test_a_symlink_swapped_in_under_way(host_files: Path) -> None:
    """Whatever is renamed while it is opened, what is mounted lies below the root."""
    root = host_files / "race"
    (root / "d").mkdir(parents=True)
    (root / "d" / "file").write_text("inside\n")
    (root / "l").symlink_to(host_files / "outside")
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            os.rename(root / "d", root / "t")
            os.rename(root / "l", root / "d")
            os.rename(root / "d", root / "l")
            os.rename(root / "t", root / "d")

    racer = threading.Thread(target=swap)
    racer.start()
    user_ns = os.open("/proc/self/ns/user", os.O_RDONLY)
    seen: dict[Any, int] = {}
    try:
        deadline = time.monotonic() + times.scaled(60)
        tries = 0
        while tries < SWAPS or len(seen) < 2 or "inside\n" not in seen:
            assert time.monotonic() < deadline, seen
            tries += 1
            try:
                found = open_mount(
                    [MountRoot(str(root), mapped=False)],
                    f"{root}/d/file",
                    writable=False,
                    user_ns=user_ns,
                )
            except OSError as error:
                seen[error.errno] = seen.get(error.errno, 0) + 1
                continue
            try:
                with open(f"/proc/self/fd/{found.fd}", encoding="ascii") as file:
                    text = file.read()
            finally:
                os.close(found.fd)
            seen[text] = seen.get(text, 0) + 1
    finally:
        done.set()
        racer.join()
        os.close(user_ns)
    # That both ways were met is the control: the right one was there at times, and not at others.
    assert "outside\n" not in seen
