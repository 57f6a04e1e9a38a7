"""Images that the kernel serves: seen as with squashfuse, and refused by name if unknown."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.at_once import client_of, in_background
from tests.e2e.host_processes import family_with, new_marker, pids_with, wait_for, wait_for_marker
from tests.e2e.refusals import refusal
from tests.e2e.test_adoption import node
from tests.e2e.test_layered_images import make_layout
from tests.e2e.test_sweep import sweep
from tests.framework import host_state, images
from tests.framework.daemon import Daemon, running_daemon, start
from tests.framework.leaks import LeakCheck

pytestmark = pytest.mark.needs("loop")

KERNEL = {"SANDBOXD_IMAGE_BACKEND": "kernel"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled_store(tmp_path_factory.mktemp("kernel-images"))


def filled_store(scratch: Path) -> Path:
    """A store below an empty directory: one base, two environments, three tasks on each."""
    names = make_layout(scratch / "oci")
    listing = "".join(f"oci:{scratch / 'oci'}:{name} task/{name}:1\n" for name in names)
    (scratch / "list").write_text(listing)
    command = [sys.executable, "-m", "sif_tools", "convert", "--batch", str(scratch / "list")]
    command += ["--store", str(scratch / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return scratch / "store"


@pytest.fixture
def kernel(leak_check: LeakCheck, filled: Path, busybox: Path) -> Iterator[Daemon]:
    """A daemon whose kernel serves a store; `plain`, beside it, is in no store."""
    with running_daemon(leak_check, {}, environment=KERNEL) as daemon:
        shutil.copytree(filled, daemon.images_dir, dirs_exist_ok=True)
        shutil.copyfile(busybox, daemon.images_dir / "plain.sif")
        yield daemon


def loops_of(daemon: Daemon) -> list[str]:
    """The loop devices whose files are this daemon's, by what the kernel says of them."""
    found = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            path = device.read_text().strip()
        except OSError:
            continue  # just detached
        if path.startswith(str(daemon.images_dir)):
            found.append(path)
    return found


def objects(daemon: Daemon) -> list[Path]:
    return sorted(daemon.images_dir.glob("objects/*/*/*.sif"))


def test_a_stack_is_seen_as_it_is_with_its_owners(kernel: Daemon) -> None:
    with kernel.sandbox("task/e0t1:1") as sandbox:
        script = "echo $TASK; id -un; pwd; cat task; echo; cat /etc/from; echo; cat /etc/env; echo;"
        script += "stat -c '%u %a' /work/task /etc/passwd /"
        done = kernel.exec(sandbox, script)
        assert done["stdout"].splitlines() == [
            "e0t1", "agent", "/work", "e0t1", "task", "0", "1000 600", "0 644", "0 755",
        ]  # fmt: skip
        # No server: the kernel's devices, one for each of three SIFs.
        assert family_with(kernel.refresh_family(), "squashfuse_ll") == []
        assert len(loops_of(kernel)) == 3
        node = kernel.http.get("/v1/node").json()
        assert node["features"]["image_backend"] == "kernel"


def test_lower_files_can_be_changed_and_the_image_cannot(kernel: Daemon) -> None:
    before = [path.read_bytes() for path in objects(kernel)]
    with kernel.sandbox("task/e0t0:1") as one, kernel.sandbox("task/e0t0:1") as other:
        script = "rm -r /etc && mkdir /etc && echo mine > /etc/env && chown 7:9 /bin/busybox"
        assert kernel.exec(one, script, user="0")["exit_code"] == 0
        assert kernel.exec(one, "cat /etc/env; stat -c %u:%g /bin/busybox", user="0")["stdout"] == (
            "mine\n7:9\n"
        )
        assert kernel.exec(other, "cat /etc/env; echo; stat -c %u:%g /bin/busybox")["stdout"] == (
            "0\n0:0\n"
        )
    assert [path.read_bytes() for path in objects(kernel)] == before


def test_nothing_of_the_host_is_told_and_no_device_can_be_reached(kernel: Daemon) -> None:
    with kernel.sandbox("task/e0t0:1") as sandbox:
        # Positive control: what is looked for there is seen on the host.
        assert loops_of(kernel)
        seen = kernel.exec(
            sandbox,
            "cat /proc/self/mountinfo /proc/mounts /sys/block/loop*/loop/backing_file; ls /dev",
            user="0",
        )["stdout"]
        assert str(kernel.images_dir) not in seen
        assert "loop" not in seen
        assert "overlay" in seen


def test_an_image_that_is_in_no_store_is_refused_by_name(kernel: Daemon) -> None:
    answer = kernel.http.post("/v1/sandboxes", json={"image": "plain"})
    refusal(answer, 503, "image-unverified", "node", retryable=False)
    assert "image_backend" in answer.json()["error"]["hint"]


def test_a_file_that_others_may_change_is_refused_by_name(kernel: Daemon) -> None:
    """Each of one that is good but for one thing; in the end it is taken."""
    paths = objects(kernel)

    def create() -> str:
        answer = kernel.http.post("/v1/sandboxes", json={"image": "task/e1t2:1"})
        if answer.status_code == 201:
            kernel.delete(answer.json()["id"])
            return ""
        refusal(answer, 503, "image-unverified", "node", retryable=False)
        return str(answer.json()["error"]["message"])

    for path in paths:
        os.chown(path, 1000, 1000)
    assert "owned by uid 1000" in create()
    for path in paths:
        os.chown(path, 0, 0)
        path.chmod(0o464)
    assert "0464" in create()
    for path in paths:
        path.chmod(0o444)
    writers = [os.open(path, os.O_WRONLY) for path in paths]
    assert "open for writing" in create()
    for writer in writers:
        os.close(writer)
    assert create() == ""


def test_a_file_with_other_bytes_is_refused_by_name(kernel: Daemon) -> None:
    """What the API's check of the superblock lets pass: a byte of the data."""
    for path in objects(kernel):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        with path.open("r+b") as file:
            file.write(data)
    answer = kernel.http.post("/v1/sandboxes", json={"image": "task/e0t0:1"})
    refusal(answer, 503, "image-unverified", "node", retryable=False)
    assert "SHA-256" in answer.json()["error"]["message"]


def test_a_file_that_is_changed_under_its_sandboxes_ends_them_by_name(kernel: Daemon) -> None:
    """Within the time of the launcher's watch, and the image is mounted again when it is mended."""
    sandbox = kernel.create("task/e0t0:1")
    marker = new_marker()
    whole = {path: path.read_bytes() for path in objects(kernel)}
    with client_of(kernel) as client:

        def run() -> object:
            command = {"command": ["sleep", marker], "timeout_s": 90}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        with in_background(run) as answer:
            wait_for_marker(marker)
            for path in whole:
                os.truncate(path, 4096)
            refusal(answer.result(timeout=40), 410, "sandbox-lost", "node", retryable=True)
            assert pids_with(marker) == []
    kernel.delete(sandbox)
    wait_for(lambda: loops_of(kernel) == [], "the watch to have found all three")
    for path, data in whole.items():
        path.write_bytes(data)

    def is_taken() -> bool:
        # What was looked at is taken at its word for a moment longer; that is named, too.
        answer = kernel.http.post("/v1/images", json={"image": "task/e0t0:1"})
        if answer.status_code != 200:
            refusal(answer, 503, "image-unavailable", "node", retryable=True)
        return answer.status_code == 200

    wait_for(is_taken, "the mended files to be seen", 10)
    with kernel.sandbox("task/e0t0:1") as again:
        assert kernel.exec(again, ["cat", "/work/task"])["stdout"] == "e0t0"


def test_an_unmount_frees_the_devices(kernel: Daemon) -> None:
    kernel.warm_up("task/e0t0:1")
    assert len(loops_of(kernel)) == 3
    names = [i["name"] for i in kernel.http.get("/v1/images").json()["images"] if i["mounted"]]
    for name in names:
        assert kernel.http.delete(f"/v1/images/{name}").status_code == 204
    wait_for(lambda: loops_of(kernel) == [], "the devices to go")


def test_a_node_that_is_killed_leaves_no_device(leak_check: LeakCheck, filled: Path) -> None:
    with running_daemon(leak_check, {}, environment=KERNEL) as daemon:
        shutil.copytree(filled, daemon.images_dir, dirs_exist_ok=True)
        daemon.create("task/e0t0:1")
        assert len(loops_of(daemon)) == 3
        for pid in daemon.refresh_family():
            with contextlib.suppress(ProcessLookupError):  # one that ends with another is gone
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: loops_of(daemon) == [], "the devices to go")
        sweep(daemon)


def test_the_next_daemon_takes_the_kernels_images_over(leak_check: LeakCheck, filled: Path) -> None:
    with leak_check.around("the node"), contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX))
        stack.callback(shutil.rmtree, home)
        home.chmod(0o755)
        shutil.copytree(filled, home / "images")
        stack.enter_context(node(home, KERNEL | {"SANDBOXD_IMAGES_DIR": str(home / "images")}))
        first = start(home)
        first.wait_ready()
        sandbox = first.create("task/e0t1:1")
        first.kill()
        first.stop()
        second = start(home)
        stack.callback(second.stop)
        second.wait_ready()
        assert second.exec(sandbox, ["cat", "/work/task"])["stdout"] == "e0t1"
        assert len(loops_of(second)) == 3
        with second.sandbox("task/e0t1:1") as new:
            assert second.exec(new, ["cat", "/work/task"])["stdout"] == "e0t1"
        assert len(loops_of(second)) == 3
        second.delete(sandbox)


def test_a_node_without_loop_devices_is_refused_by_name() -> None:
    """In a mount namespace in which there is nothing at /dev/loop-control."""
    command = "mount -t tmpfs none /dev/shm && touch /dev/shm/none"
    command += " && mount --bind /dev/shm/none /dev/loop-control"
    serve = f"{sys.executable} -m sandboxd doctor"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SANDBOXD_")}
    answers = []
    for backend in ("fuse", "kernel"):
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"{command} && exec {serve}"],
            env={**environment, "SANDBOXD_IMAGE_BACKEND": backend},
            capture_output=True,
            text=True,
            check=False,
            cwd=images.REPOSITORY,
        )
        answers.append((done.returncode, "image_backend" in done.stdout))
    assert answers == [(0, False), (1, True)]
