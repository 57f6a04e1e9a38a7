"""Images that a store keeps as a base and what is laid over it: the node stacks them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import image_factory
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck
from tests.unit.sif_tools.image_factories import LayoutMaker, member, tar_bytes

ENVIRONMENTS = 2
TASKS = 3


@pytest.fixture(scope="module")
def store(
    leak_check: LeakCheck, busybox: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """A daemon whose images are a store: one base, two environments, three tasks on each."""
    scratch = tmp_path_factory.mktemp("layered")
    names = make_layout(scratch / "oci")
    with running_daemon(leak_check, {}) as daemon:
        listing = "".join(f"oci:{scratch / 'oci'}:{name} task/{name}:1\n" for name in names)
        (scratch / "list").write_text(listing)
        run("convert", "--batch", str(scratch / "list"), "--store", str(daemon.images_dir))
        for name in names:
            daemon.warm_up(f"task/{name}:1")
        yield daemon


def make_layout(directory: Path) -> list[str]:
    maker = LayoutMaker(directory)
    base = image_factory._layer(Path("/bin/busybox"), [("etc/from", b"base"), ("etc/old", b"")])
    names = []
    for env in range(ENVIRONMENTS):
        tar = [member("etc/env", str(env).encode()), member("etc/.wh.old", b"")]
        middle = tar_bytes(tar)
        for task in range(TASKS):
            name = f"e{env}t{task}"
            own = tar_bytes(
                [
                    member("work/", uid=1000),
                    member("work/task", name.encode(), uid=1000, mode=0o600),
                    member("etc/from", b"task"),
                ]
            )
            config = {"Env": ["PATH=/bin", f"TASK={name}"], "User": "agent", "WorkingDir": "/work"}
            layers = [(tar, tar) for tar in (base, middle, own)]
            maker.add(maker.image(layers, config=config), name)
            names.append(name)
    maker.finish()
    return names


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "sif_tools", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def mounted(daemon: Daemon) -> dict[str, int]:
    rows = daemon.http.get("/v1/images").json()["images"]
    return {row["name"]: row["users"] for row in rows if row["mounted"]}


def test_a_sandbox_of_a_layered_image_sees_all_its_layers(store: Daemon) -> None:
    for name in ("e0t0", "e1t2"):
        with store.sandbox(f"task/{name}:1") as sandbox:
            result = store.exec(
                sandbox,
                "echo $TASK; id -un; pwd; cat /work/task; echo; cat /etc/from; echo;"
                " cat /etc/env; echo; ls /etc",
            )
            assert result["exit_code"] == 0, result
            lines = result["stdout"].splitlines()
            assert lines[:6] == [name, "agent", "/work", name, "task", name[1]]
            assert set(lines[6:]) == {"env", "from", "group", "passwd"}


def test_lower_layers_can_be_changed_and_are_nobody_elses(store: Daemon) -> None:
    with store.sandbox("task/e0t0:1") as one, store.sandbox("task/e0t1:1") as other:
        done = store.exec(one, "rm -r /etc && mkdir /etc && echo mine > /etc/env", user="0")
        assert done["exit_code"] == 0, done
        assert store.exec(one, ["cat", "/etc/env"], user="0")["stdout"] == "mine\n"
        assert store.exec(one, ["ls", "/etc"], user="0")["stdout"] == "env\n"
        assert store.exec(other, ["cat", "/etc/env"])["stdout"] == "0"


def test_what_images_share_is_mounted_once(store: Daemon) -> None:
    names = [f"task/e0t{task}:1" for task in range(TASKS)]
    with store.sandbox(names[0]), store.sandbox(names[1]), store.sandbox(names[2]):
        users = mounted(store)
    assert [users[name] for name in names] == [1, 1, 1]
    shared = sorted(count for name, count in users.items() if name.startswith("sha256:"))
    assert shared == [0, TASKS, TASKS]  # the other environment, this one, the base
    assert sum(mounted(store).values()) == 0


def test_the_store_lists_its_names(store: Daemon) -> None:
    rows = store.http.get("/v1/images").json()["images"]
    there = {row["name"] for row in rows if row["modified_at"] is not None}
    assert there == {f"task/e{e}t{t}:1" for e in range(ENVIRONMENTS) for t in range(TASKS)}
