"""Images that are built to get out: what they bring works for the sandbox at most."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.framework import images
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

KERNEL_DIRECTORIES = ("proc", "sys", "dev")
INSTEAD = {"link": "/tmp", "link-upwards": "../../../../tmp", "file": None}


def with_device_nodes(rootfs: Path) -> None:
    os.mknod(rootfs / "mem", 0o20666, os.makedev(1, 1))
    os.mknod(rootfs / "zero", 0o20666, os.makedev(1, 5))
    os.mknod(rootfs / "disk", 0o60666, os.makedev(7, 0))


def with_setuid_programs(rootfs: Path) -> None:
    (rootfs / "bin/busybox").chmod(0o6755)


def with_overlay_marks(rootfs: Path) -> None:
    (rootfs / "marked").mkdir()
    (rootfs / "marked/file").write_text("x")
    for name, value in (("redirect", b"/etc"), ("opaque", b"y"), ("metacopy", b"")):
        for path in (rootfs / "marked", rootfs / "marked/file"):
            with suppress(OSError):
                os.setxattr(path, f"user.overlay.{name}", value)


def with_another(directory: str, target: str | None) -> Callable[[Path], None]:
    def change(rootfs: Path) -> None:
        (rootfs / directory).rmdir()
        if target is None:
            (rootfs / directory).write_text("")
        else:
            (rootfs / directory).symlink_to(target)

    return change


CHANGES = {
    "device-nodes": with_device_nodes,
    "setuid-programs": with_setuid_programs,
    "overlay-marks": with_overlay_marks,
    **{
        f"{directory}-is-a-{kind}": with_another(directory, target)
        for directory in KERNEL_DIRECTORIES
        for kind, target in INSTEAD.items()
    },
}


@pytest.fixture(scope="module")
def node(leak_check: LeakCheck, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon of its own with these images, each mounted before the first test."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox (package busybox-static)")
    made = {}
    for name, change in CHANGES.items():
        directory = tmp_path_factory.mktemp(name)
        images.make_busybox_rootfs(Path(busybox), directory / "rootfs")
        change(directory / "rootfs")
        with suppress(RuntimeError):  # refused when it is made, which is as good
            made[name] = images.convert(f"rootfs:{directory}/rootfs", directory / f"{name}.sif")
    with running_daemon(leak_check, made) as daemon:
        for name in made:
            answer = daemon.http.post("/v1/images", json={"image": name})
            assert answer.status_code in (200, 422), answer.text
        daemon.warm_up("setuid-programs")
        yield daemon


def test_device_nodes_of_an_image_do_not_open(node: Daemon) -> None:
    answer = node.http.post("/v1/sandboxes", json={"image": "device-nodes"})
    if not answer.is_success:
        assert answer.json()["error"]["code"] in ("image-not-found", "image-invalid")
        return
    sandbox = answer.json()["id"]
    for name in ("mem", "zero", "disk"):
        told = node.exec(sandbox, f"head -c 1 /{name}")
        assert told["exit_code"] != 0, name
        assert "denied" in told["stderr"] or "No such" in told["stderr"], told
    assert node.exec(sandbox, "head -c 1 /dev/zero | wc -c")["stdout"].strip() == "1"
    node.delete(sandbox)


@pytest.mark.parametrize("directory", KERNEL_DIRECTORIES)
@pytest.mark.parametrize("kind", INSTEAD)
def test_image_whose_kernel_directory_is_something_else_is_refused(
    directory: str, kind: str, node: Daemon
) -> None:
    answer = node.http.post("/v1/sandboxes", json={"image": f"{directory}-is-a-{kind}"})
    assert answer.status_code >= 400, answer.text
    error = answer.json()["error"]
    assert error["code"] in ("sandbox-setup-failed", "image-invalid", "image-not-found"), error
    assert not error["retryable"]


def test_setuid_programs_of_an_image_gain_nothing(node: Daemon) -> None:
    with node.sandbox("setuid-programs") as sandbox:
        assert node.exec(sandbox, "stat -c %a /bin/busybox")["stdout"].strip() == "6755"
        told = node.exec(sandbox, "grep ^Uid: /proc/self/status", user="agent")
        assert told["stdout"].split() == ["Uid:", *["1000"] * 4]


def test_overlay_marks_of_an_image_are_not_believed(node: Daemon) -> None:
    """An image is a lower layer: a redirect in it could point at another layer's files."""
    with node.sandbox("overlay-marks") as sandbox:
        assert node.exec(sandbox, "ls /marked")["stdout"].split() == ["file"]
