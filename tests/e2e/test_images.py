"""Images: what may be mounted is, once for all its sandboxes; what may not is refused by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.at_once import at_once, client_of
from tests.e2e.host_processes import family_with, wait_for
from tests.e2e.refusals import refusal
from tests.framework import images
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

# vectors/README.md: a valid SIF whose partition is junk.
JUNK = (
    "empty.sif",
    "one-group.sif",
    "one-group-signed-dsse.sif",
    "one-group-signed-legacy.sif",
    "one-group-signed-legacy-all.sif",
    "one-group-signed-legacy-group.sif",
    "one-group-signed-pgp.sif",
)
FOREIGN = {"busybox_arm64.sif": "arm64", "busybox_ppc64le.sif": "ppc64le"}


@pytest.fixture(scope="module")
def store(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    """A daemon with every vector that apptainer itself uses as an image, and some that are none."""
    vectors = images.vectors_dir() / "apptainer+apptainer"
    known = {"busybox": busybox, "vector": images.busybox_vector(), "deep/er/busybox": busybox}
    known |= {f"junk-{name.removesuffix('.sif')}": vectors / "test/images" / name for name in JUNK}
    known |= {f"foreign-{arch}": vectors / "e2e/testdata" / n for n, arch in FOREIGN.items()}
    del known["deep/er/busybox"]
    with running_daemon(leak_check, known) as daemon:
        below = daemon.images_dir / "deep/er"
        below.mkdir(parents=True)
        shutil.copyfile(busybox, below / "busybox.sif")
        whole = busybox.read_bytes()
        for name, data in {
            "empty": b"",
            "text": b"not an image\n" * 1000,
            "cut": whole[: len(whole) // 2],
            "head": whole[:4096],
        }.items():
            (daemon.images_dir / f"{name}.sif").write_bytes(data)
        os.mkfifo(daemon.images_dir / "fifo.sif")
        (daemon.images_dir / "directory.sif").mkdir()
        (daemon.images_dir / "dangling.sif").symlink_to("nowhere.sif")
        closed = daemon.images_dir / "closed.sif"
        shutil.copyfile(busybox, closed)
        closed.chmod(0)
        daemon.warm_up("busybox")
        daemon.warm_up("vector")
        yield daemon


def refused(daemon: Daemon, image: str, status: int, code: str, cause: str = "request"):
    error = refusal(daemon.http.post("/v1/images", json={"image": image}), status, code, cause)
    made = daemon.http.post("/v1/sandboxes", json={"image": image})
    assert refusal(made, status, code, cause)["message"] == error["message"]
    assert image in error["message"]
    return error


def test_a_real_image_of_another_tool_runs(store: Daemon):
    with store.sandbox("vector") as sandbox:
        result = store.exec(sandbox, "busybox | head -1; cat /etc/group | head -1")
        assert result["stdout"].startswith("BusyBox v1.")
        assert result["stdout"].endswith("root:x:0:\n")


@pytest.mark.parametrize("name", JUNK)
def test_a_sif_whose_partition_is_junk_is_refused_by_name(store: Daemon, name: str):
    refused(store, f"junk-{name.removesuffix('.sif')}", 422, "image-invalid")


@pytest.mark.parametrize("arch", FOREIGN.values())
def test_an_image_for_another_machine_is_refused_and_says_which(store: Daemon, arch: str):
    error = refused(store, f"foreign-{arch}", 422, "image-invalid")
    assert arch in error["message"].removeprefix(f"image 'foreign-{arch}'")


@pytest.mark.parametrize("name", ["empty", "text", "cut", "head", "fifo", "directory"])
def test_what_is_no_sif_is_refused_by_name(store: Daemon, name: str):
    refused(store, name, 422, "image-invalid")


@pytest.mark.parametrize("name", ["absent", "dangling", "deep/er/absent", "busybox.sif"])
def test_an_unknown_image_is_404(store: Daemon, name: str):
    refused(store, name, 404, "image-not-found")


def test_an_image_the_daemon_may_not_read_is_the_nodes_fault(store: Daemon):
    refused(store, "closed", 503, "image-unavailable", "node")


@pytest.mark.parametrize(
    "name", ["../busybox", "..", ".", "a/../busybox", "/busybox", "a//b", "", "x" * 600, "a\0b"]
)
def test_a_name_that_could_leave_the_store_is_refused(store: Daemon, name: str):
    for path in ("/v1/images", "/v1/sandboxes"):
        refusal(store.http.post(path, json={"image": name}), 422, "request-invalid", "request")


def test_a_name_may_have_folders(store: Daemon, leak_check: LeakCheck):
    # Its mount stays, as it should.
    for kept in ("squashfuse", "namespace", "connection", "ipc:", "mnt:", "net:", "fd "):
        leak_check.allow(kept)
    with store.sandbox("deep/er/busybox") as sandbox:
        assert store.exec(sandbox, ["true"])["exit_code"] == 0


def test_images_are_listed_with_what_is_mounted(store: Daemon):
    answer = store.http.get("/v1/images").json()
    listed = {image["name"]: image for image in answer["images"]}
    assert answer["truncated"] is False
    assert {"busybox", "vector", "deep/er/busybox", "text", "empty"} <= set(listed)
    assert not {"fifo", "directory", "dangling"} & set(listed)
    assert listed["busybox"]["mounted"] is True
    assert listed["busybox"]["users"] == 0
    size = (store.images_dir / "busybox.sif").stat().st_size
    assert listed["busybox"]["size_bytes"] == size
    with store.sandbox("busybox"):
        again = {i["name"]: i for i in store.http.get("/v1/images").json()["images"]}
    assert again["busybox"]["users"] == 1


def test_preparing_an_image_says_what_it_is(store: Daemon):
    answer = store.http.post("/v1/images", json={"image": "busybox"})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["name"], made["mounted"], made["user"], made["workdir"]) == (
        "busybox", True, "0", "/",
    )  # fmt: skip


def test_many_who_ask_at_once_share_one_mount(start_daemon):
    daemon = start_daemon()
    with client_of(daemon) as client:

        def make(_: int) -> str:
            answer = client.post("/v1/sandboxes", json={"image": "busybox"})
            assert answer.status_code == 201, answer.text
            return str(answer.json()["id"])

        made = at_once(make, range(12), threads=12)
        assert len(set(made)) == 12
        assert len(family_with(daemon.refresh_family(), "squashfuse_ll")) == 1
        at_once(lambda name: client.delete(f"/v1/sandboxes/{name}"), made, threads=12)


def test_an_image_nobody_uses_is_unmounted_after_a_while(start_daemon):
    daemon = start_daemon(environment={"SANDBOXD_IMAGE_IDLE_S": "0"})
    with daemon.sandbox("busybox") as sandbox:
        assert len(family_with(daemon.refresh_family(), "squashfuse_ll")) == 1
        assert daemon.exec(sandbox, ["true"])["exit_code"] == 0
    wait_for(lambda: family_with(daemon.refresh_family(), "squashfuse_ll") == [], "an idle unmount")
    with daemon.sandbox("busybox") as sandbox:
        assert daemon.exec(sandbox, ["true"])["exit_code"] == 0


def test_a_replaced_file_is_another_image_and_the_old_sandboxes_go_on(
    start_daemon, busybox: Path, configured: Path
):
    daemon = start_daemon(images={"task": busybox})
    with daemon.sandbox("task") as old:
        beside = daemon.images_dir / ".new"
        shutil.copyfile(configured, beside)
        beside.chmod(0o444)
        beside.rename(daemon.images_dir / "task.sif")

        def user_of_a_new_one() -> str:
            with daemon.sandbox("task") as new:
                return str(daemon.exec(new, ["id", "-u"])["stdout"])

        wait_for(lambda: user_of_a_new_one() == "1000\n", "the new file to be seen", 10)
        # A file of the image that nobody has read yet.
        assert daemon.exec(old, "id -u; cat /etc/group | head -1")["stdout"] == "0\nroot:x:0:\n"


def test_a_removed_file_leaves_its_sandboxes_running(start_daemon, busybox: Path):
    daemon = start_daemon(images={"task": busybox})
    with daemon.sandbox("task") as sandbox:
        (daemon.images_dir / "task.sif").unlink()
        assert daemon.exec(sandbox, ["cat", "/etc/group"])["exit_code"] == 0

        def is_gone() -> bool:
            answer = daemon.http.post("/v1/sandboxes", json={"image": "task"})
            if answer.status_code == 201:
                daemon.delete(answer.json()["id"])
            return answer.status_code == 404

        wait_for(is_gone, "the file's removal to be seen", 10)


def test_a_warm_command_asks_the_images_server_for_nothing(start_daemon):
    daemon = start_daemon()
    with daemon.sandbox("busybox") as sandbox:
        script = "ls /bin > /dev/null; /bin/cat /etc/passwd; test -e /etc/none; /bin/busybox true"
        daemon.exec(sandbox, script)
        (server,) = family_with(daemon.refresh_family(), "squashfuse_ll")

        def requests() -> int:
            lines = Path(f"/proc/{server}/io").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("syscr")).split()[1])

        before = requests()
        for _ in range(10):
            assert daemon.exec(sandbox, script)["exit_code"] == 0
        # But for the launcher's watch, whose statfs is never answered from memory.
        assert requests() - before < 10
