"""What a crash leaves behind is found and removed, and nothing of anybody else's is touched."""

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

from sandboxd.config import load_config
from sandboxd.host.command import cgroup_name
from sandboxd.linux import cgroup, mount
from tests.e2e.host_processes import (
    family_with,
    new_marker,
    pids_with,
    wait_for,
    wait_for_end,
)
from tests.e2e.restarts import started_again
from tests.framework import host_state
from tests.framework.daemon import Daemon
from tests.framework.fixtures import StartDaemon


def hierarchies() -> list[Path]:
    """cgroup2, and v1's memory if there is one: a place that limits and one that does not."""
    layout = cgroup.layout()
    found = [layout.own.get("", layout.v2_mount), layout.own.get("memory", layout.v1.get("memory"))]
    return [path for path in found if path is not None]


def name_of(daemon: Daemon) -> str:
    settings = {"cgroup_root": daemon.state_dir.parent.name, "runtime_dir": str(daemon.runtime_dir)}
    return cgroup_name(load_config(env={}, overrides=settings))


@contextlib.contextmanager
def crashed_group(parent: Path, name: str) -> Iterator[tuple[Path, int]]:
    """A cgroup like a node's, in a slice of its own, with a process in it."""
    slice_ = parent / f"{host_state.OWN_PREFIX}slice"
    slice_.mkdir()
    group = slice_ / name
    (group / "s1").mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            cgroup.add_process(group / "s1", process.pid)
            yield group, process.pid
        finally:
            process.kill()
            process.wait()
            for path in (group / "s1", group, slice_):
                with contextlib.suppress(FileNotFoundError):
                    path.rmdir()


def sweep(daemon: Daemon, *arguments: str) -> list[str]:
    home = daemon.state_dir.parent
    environment = {"SANDBOXD_CGROUP_ROOT": home.name, "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "sandboxd", "sweep", *arguments]
    command += ["--runtime-dir", str(daemon.runtime_dir), "--state-dir", str(daemon.state_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_everything_killed_at_once_leaves_nothing_to_the_next_start(start_daemon: StartDaemon):
    daemon = start_daemon()
    marker = new_marker()
    for _ in range(4):
        sandbox = daemon.create("busybox")
        daemon.exec(sandbox, f"trap '' TERM; setsid sleep {marker} & true")
    family = daemon.refresh_family()
    [hostd] = family_with(family, "sandboxd.host")
    name = name_of(daemon)
    # Stopped first, so that none of them can take the others down in an orderly way.
    for pid in (hostd, *family_with(family, "sandboxd.launcher"), *family_with(family, "zygote")):
        os.kill(pid, signal.SIGSTOP)
    for pid in (daemon.pid, hostd, *family_with(family, "sandboxd.launcher")):
        with contextlib.suppress(ProcessLookupError):  # one that ends with another is gone
            os.kill(pid, signal.SIGKILL)
    daemon.process.wait()
    wait_for_end(hostd)
    left = [Path(parent, name) for parent in hierarchies() if Path(parent, name).exists()]
    assert left, "the crash has left no cgroup: there is nothing to test"
    with started_again(daemon) as again:
        assert pids_with(marker) == []
        for pid in family:
            wait_for_end(pid)
        with again.sandbox("busybox") as fresh:
            assert again.exec(fresh, ["echo", "on"])["stdout"] == "on\n"
    for parent in hierarchies():
        assert not Path(parent, name).exists()


@pytest.mark.parametrize("which", [0, 1], ids=["cgroup2", "memory"])
def test_a_node_that_stood_elsewhere(start_daemon: StartDaemon, which: int):
    """A former life in another slice, which the start's own clean-up does not look at."""
    if which >= len(hierarchies()):
        pytest.skip("there is no v1 memory hierarchy here")
    daemon = start_daemon()
    parent = hierarchies()[which]
    with crashed_group(parent, name_of(daemon)) as (group, pid):
        told = sweep(daemon, "--dry-run")
        assert [line for line in told if str(group) in line and f"sleep[{pid}]" in line]
        assert group.exists()
        assert sweep(daemon) == told
        assert not group.exists()
        wait_for_end(pid, 5)
        assert sweep(daemon) == []
    with daemon.sandbox("busybox") as fresh:  # the living node was left alone
        assert daemon.exec(fresh, ["echo", "on"])["stdout"] == "on\n"


def test_the_node_does_it_by_itself(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_SWEEP_S": "0.5"})
    with crashed_group(hierarchies()[0], name_of(daemon)) as (group, pid):
        wait_for(lambda: not group.exists(), "the sweep")
        wait_for_end(pid, 5)
    assert "swept: removed cgroup" in daemon.log_file.read_text()


def test_another_instance_s_stays(start_daemon: StartDaemon):
    daemon = start_daemon()
    name = name_of(daemon)
    other = name[:-1] + ("0" if name[-1] != "0" else "1")  # another runtime directory's hash
    token = daemon.state_dir / f"token.{os.getpid()}.0123abcd"  # we live, and may be making it
    token.write_text("half")
    lookalikes = [daemon.state_dir / "token.old", daemon.state_dir / "token.99.xyz"]
    for path in lookalikes:
        path.write_text("a user's own")
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(crashed_group(p, other)) for p in hierarchies()]
        assert sweep(daemon) == []
        for group, pid in groups:
            assert (group / "s1").exists()
            os.kill(pid, 0)
    for path in (token, *lookalikes):
        assert path.exists()
        path.unlink()


def test_a_living_node_of_the_same_name_stays(start_daemon: StartDaemon):
    """A container's, with a runtime directory of the same path: its hostd lives."""
    daemon = start_daemon()
    parent = hierarchies()[0] / f"{host_state.OWN_PREFIX}container"
    group = parent / name_of(daemon)
    (group / "node").mkdir(parents=True)
    script = "import subprocess, sys; subprocess.run(['sleep', sys.argv[2]])"
    marker = new_marker()
    hostd = subprocess.Popen([sys.executable, "-c", script, "sandboxd.host", marker])
    try:
        wait_for(lambda: len(_sleeping(marker)) == 1, "its launcher")
        [launcher] = _sleeping(marker)
        cgroup.add_process(group / "node", launcher)
        assert sweep(daemon) == []
        os.kill(launcher, 0)
        # The control: without its hostd it is a crash's.
        hostd.kill()
        hostd.wait()
        assert [line for line in sweep(daemon) if str(group) in line]
        wait_for_end(launcher, 5)
    finally:
        hostd.kill()
        hostd.wait()
        for pid in _sleeping(marker):
            os.kill(pid, signal.SIGKILL)
        for path in (group / "node", group, parent):
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()


def _sleeping(marker: str) -> list[int]:
    return [pid for pid in pids_with(marker) if host_state.process_table()[pid].name == "sleep"]


def test_a_half_made_token_of_a_process_that_is_gone(start_daemon: StartDaemon):
    daemon = start_daemon()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    path = daemon.state_dir / f"token.{gone.pid}.0123abcd"
    path.write_text("half")
    assert sweep(daemon) == [f"file {path} (its maker is gone)"]
    assert not path.exists()
    assert daemon.token


def test_mounts_in_the_host_s_own_namespace():
    """Where no node ever was: what lies there under its names is removed, a user's mount is not."""
    home = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX))
    run = home / "run"
    (run / "mnt").mkdir(parents=True)
    (run / "own").mkdir()
    environment = {"SANDBOXD_RUNTIME_DIR": str(run), "SANDBOXD_STATE_DIR": str(home)}
    environment |= {"PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "sandboxd", "sweep"]
    mount.mount("images", str(run / "mnt"), "tmpfs", 0, "size=64k")
    mount.mount("user", str(run / "own"), "tmpfs", 0, "size=64k")
    try:
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert told.stdout.splitlines() == [
            f"mount {run}/mnt (tmpfs)",
            f"file {run}/mnt",
        ]
        mounted = {one.mountpoint for one in mount.mountinfo()}
        assert str(run / "mnt") not in mounted
        assert str(run / "own") in mounted
    finally:
        mount.umount2(str(run / "own"), mount.MNT_DETACH)
        shutil.rmtree(home)


def test_what_a_living_node_has_lost_track_of(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_SWEEP_S": "0.5"})
    launcher = family_with(daemon.refresh_family(), "sandboxd.launcher")[0]
    own = cgroup.layout(launcher).own[""].parent
    assert own.name == name_of(daemon)
    lost = own / "s999999"
    lost.mkdir()
    owner = own.stat().st_uid
    for path in (lost, lost / "cgroup.kill"):  # as one that the launcher made
        os.chown(path, owner, owner)
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            cgroup.add_process(lost, process.pid)
            wait_for(lambda: not lost.exists(), "the launcher's own sweep")
        finally:
            process.kill()
    with daemon.sandbox("busybox") as alive:
        assert f"swept cgroup {lost}" in daemon.log_file.read_text()
        assert daemon.exec(alive, ["echo", "on"])["stdout"] == "on\n"
