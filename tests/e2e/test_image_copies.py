"""Hot images of a store come to lie on the node's own disk; what a sandbox sees is the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.host_processes import family_with, wait_for
from tests.e2e.test_kernel_images import filled_store
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

NAME = "task/e0t0:1"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled_store(tmp_path_factory.mktemp("copies"))


@pytest.fixture
def daemon(leak_check: LeakCheck, filled: Path) -> Iterator[Daemon]:
    settings = {"SANDBOXD_IMAGE_COPIES_MB": "64", "SANDBOXD_IMAGE_READ_AHEAD_MB": "64"}
    with running_daemon(leak_check, {}, environment=settings) as started:
        shutil.copytree(filled, started.images_dir, dirs_exist_ok=True)
        yield started


def served_from(daemon: Daemon) -> set[str]:
    """The directories whose files the image servers have open."""
    found = set()
    for pid in family_with(daemon.refresh_family(), "squashfuse_ll"):
        with suppress(OSError):
            found.add(os.path.dirname(os.readlink(f"/proc/{pid}/fd/4")))
    return found


def is_local(daemon: Daemon) -> bool:
    rows = {row["name"]: row for row in daemon.http.get("/v1/images").json()["images"]}
    return bool(rows[NAME]["local"])


def look(daemon: Daemon, sandbox: str) -> str:
    done = daemon.exec(sandbox, "cat task; cat /etc/env /etc/from; stat -c %u /work/task")
    return str(done["stdout"])


def test_a_hot_image_is_mounted_from_its_copy_and_old_sandboxes_keep_theirs(daemon: Daemon):
    local = str(daemon.state_dir / "image-copies")
    with daemon.sandbox(NAME) as old:
        seen = look(daemon, old)
        assert not is_local(daemon)
        assert local not in served_from(daemon)
        for _ in range(2):
            with daemon.sandbox(NAME):
                pass
        wait_for(lambda: is_local(daemon), "copies of all three parts")
        with daemon.sandbox(NAME) as new:
            assert local in served_from(daemon)
            assert look(daemon, new) == seen
        assert look(daemon, old) == seen
    figures = daemon.http.get("/metrics").text
    assert "sandboxd_image_copies 3.0" in figures
    assert 'sandboxd_image_copies_total{outcome="made"} 3.0' in figures


def test_a_copy_that_is_lost_is_made_again_and_nobody_fails(daemon: Daemon):
    for _ in range(3):
        with daemon.sandbox(NAME):
            pass
    wait_for(lambda: is_local(daemon), "copies of all three parts")
    for path in (daemon.state_dir / "image-copies").iterdir():
        path.unlink()

    def is_local_again() -> bool:
        # What is mounted is not asked for: a part of it may be lost a create later than another.
        with daemon.sandbox(NAME) as sandbox:
            assert look(daemon, sandbox).startswith("e0t0")
        return is_local(daemon)

    wait_for(is_local_again, "copies of all three parts again")


def test_a_snapshot_from_before_the_copy_can_be_forked_and_rolled_back_to(daemon: Daemon):
    with daemon.sandbox(NAME) as old:
        daemon.exec(old, "echo written > /work/written", user="0")
        taken = daemon.http.post(f"/v1/sandboxes/{old}/snapshots", json={})
        assert taken.status_code == 201, taken.text
        snapshot = taken.json()["id"]
        for _ in range(2):
            with daemon.sandbox(NAME):
                pass
        wait_for(lambda: is_local(daemon), "copies of all three parts")
        with daemon.sandbox(NAME) as new:
            made = daemon.http.post("/v1/sandboxes", json={"snapshot": snapshot})
            assert made.status_code == 201, made.text
            fork = made.json()["id"]
            back = daemon.http.post(f"/v1/sandboxes/{new}/rollback", json={"snapshot": snapshot})
            assert back.status_code == 200, back.text
            for sandbox in (fork, new):
                assert daemon.exec(sandbox, ["cat", "/work/written"])["stdout"] == "written\n"
                assert look(daemon, sandbox).startswith("e0t0")
            daemon.delete(fork)
        assert daemon.http.delete(f"/v1/snapshots/{snapshot}").is_success
    rows = daemon.http.get("/v1/images").json()["images"]
    assert {row["users"] for row in rows} == {0}
