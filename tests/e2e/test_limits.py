"""What a sandbox uses up is its own: memory, processes, disk, inodes, CPU, open files.

A greedy sandbox hurts itself only, a neighbour goes on being made and used, and what happened is
told as the workload's doing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.at_once import client_of, in_background
from tests.e2e.host_processes import new_marker, pids_with, status_of, wait_for_marker
from tests.e2e.refusals import refusal
from tests.framework import host_state
from tests.framework.daemon import Daemon

MIB = 1 << 20
FORK_BOMB = "b(){ b|b& };b"
"""As ``:(){ :|:& };:``, under a name that ash takes for one."""
RESERVE_MIB = 16


@contextmanager
def a_neighbour_that_works(daemon: Daemon, rounds: int = 12) -> Iterator[None]:
    """Beside the block, `rounds` sandboxes are made, used and deleted; each result is checked."""

    def live() -> int:
        with client_of(daemon) as client:
            for n in range(rounds):
                made = client.post("/v1/sandboxes", json={"image": "busybox"})
                assert made.status_code == 201, made.text
                url = f"/v1/sandboxes/{made.json()['id']}"
                for k in range(3):
                    script = f"echo {n} | cat; head -c {MIB} /dev/zero | wc -c; exit {k}"
                    done = client.post(f"{url}/exec", json={"command": script}).json()
                    assert (done["exit_code"], done["stdout"]) == (k, f"{n}\n{MIB}\n"), done
                assert client.delete(url).status_code == 204
        return rounds

    with in_background(live) as neighbour:
        yield
        assert neighbour.result() == rounds


def tasks_in(daemon: Daemon, sandbox: str) -> int:
    """Processes of the sandbox, as the daemon's own answer cannot say it: by its pid namespace."""
    out = daemon.exec(sandbox, "ls -d /proc/[0-9]* | wc -l")["stdout"]
    return int(out)


@pytest.mark.parametrize("user", ["root", "agent"])
def test_a_fork_bomb_hurts_only_its_own_sandbox(daemon: Daemon, user: str):
    with daemon.sandbox("busybox", limits={"pids": 128}) as sandbox:
        with a_neighbour_that_works(daemon):
            bomb = {"user": user, "timeout_s": 6, "grace_s": 0}
            result = daemon.exec(sandbox, f"{FORK_BOMB}\nexec sleep 100", **bomb)
        assert (result["exit_code"], result["timed_out"]) == (124, True)
        # The tree is gone with its exec, and the sandbox can be used again.
        assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
        assert tasks_in(daemon, sandbox) <= 5


def test_a_sandbox_at_its_process_limit_says_so(daemon: Daemon):
    marker = new_marker()
    with daemon.sandbox("busybox", limits={"pids": 32}) as sandbox, client_of(daemon) as client:
        files = f"/v1/sandboxes/{sandbox}/files"
        # The shell gives up at the limit and goes, which leaves room for exactly one more.
        daemon.exec(sandbox, f"while true; do sleep {marker} & done")
        last = {"command": ["sleep", marker], "timeout_s": 100}
        with in_background(lambda: client.post(f"/v1/sandboxes/{sandbox}/exec", json=last)):
            wait_for_marker(marker, count=32)
            for answer in (
                daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": ["true"]}),
                daemon.http.get(files, params={"path": "/etc/group"}),
                daemon.http.put(files, params={"path": "/work/x"}, content=b"x"),
            ):
                refusal(answer, 409, "pids-exhausted", "workload")
            daemon.delete(sandbox)


def test_as_many_processes_as_the_limit_says_can_run(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"pids": 32}) as sandbox:
        # The shell itself is one of them.
        script = "i=1; while [ $i -lt {n} ]; do sleep 5 & i=$((i+1)); done 2>&1; echo $i"
        assert daemon.exec(sandbox, script.replace("{n}", "32"))["stdout"] == "32\n"


@pytest.mark.parametrize("user", ["root", "agent"])
def test_a_memory_hog_hurts_only_its_own_sandbox(daemon: Daemon, user: str):
    limits = {"memory_mb": 64, "disk_mb": 16}
    with daemon.sandbox("busybox", limits=limits) as sandbox:
        with a_neighbour_that_works(daemon):
            for _ in range(4):
                hog = ["dd", "if=/dev/zero", "of=/dev/null", "bs=400M", "count=1"]
                result = daemon.exec(sandbox, hog, user=user)
                assert (result["exit_code"], result["signal"]) == (137, 9)
                assert result["oom_killed"] is True
                assert result["timed_out"] is False
        assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"
        assert daemon.http.get(f"/v1/sandboxes/{sandbox}").json()["state"] == "running"


def test_a_hog_of_many_processes_does_not_take_the_sandbox_along(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"memory_mb": 64, "disk_mb": 16}) as sandbox:
        script = """
            for i in $(seq 20); do
                (while :; do dd if=/dev/zero of=/dev/null bs=60M count=1; done) 2>&- &
            done; sleep 100
        """
        with a_neighbour_that_works(daemon, rounds=6):
            daemon.exec(sandbox, script, timeout_s=5, grace_s=0)
        assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"


def test_memory_within_the_limit_can_be_had(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"memory_mb": 64, "disk_mb": 1}) as sandbox:
        result = daemon.exec(sandbox, ["dd", "if=/dev/zero", "of=/dev/null", "bs=60M", "count=1"])
        assert (result["exit_code"], result["oom_killed"]) == (0, False)


def test_sigkill_from_inside_is_not_called_an_oom_kill(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "kill -9 $$")
    assert (result["exit_code"], result["oom_killed"]) == (137, False)


def test_a_full_disk_is_enospc_and_no_oom_kill(daemon: Daemon):
    limits = {"memory_mb": 32, "disk_mb": 128}
    with daemon.sandbox("busybox", limits=limits) as sandbox:
        with a_neighbour_that_works(daemon, rounds=4):
            for _ in range(3):
                result = daemon.exec(sandbox, ["dd", "if=/dev/zero", "of=/work/fill", "bs=1M"])
                assert result["exit_code"] == 1
                assert "No space left on device" in result["stderr"]
                assert result["oom_killed"] is False
        size = int(daemon.exec(sandbox, ["stat", "-c", "%s", "/work/fill"])["stdout"])
        assert 120 * MIB < size <= 128 * MIB
        # Still there to be looked into and cleaned up.
        assert daemon.exec(sandbox, "rm /work/fill; echo ok > /work/f; cat /work/f")["stdout"] == (
            "ok\n"
        )


def test_a_disk_of_small_files_ends_in_enospc_too(daemon: Daemon):
    limits = {"memory_mb": 64, "disk_mb": 8, "inodes": 500}
    with daemon.sandbox("busybox", limits=limits) as sandbox:
        script = "i=0; while touch /work/$i; do i=$((i+1)); done; echo $i"
        result = daemon.exec(sandbox, script)
        made = int(result["stdout"])
        assert 450 < made <= 500
        last = daemon.exec(sandbox, "mkdir /work/x; rm /work/1 /work/2; mkdir /work/y; ls /work/y")
        assert "No space left on device" in last["stderr"]
        assert last["exit_code"] == 0


def test_shm_has_its_own_bound(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"shm_mb": 8, "memory_mb": 64}) as sandbox:
        result = daemon.exec(sandbox, ["dd", "if=/dev/zero", "of=/dev/shm/fill", "bs=1M"])
        assert "No space left on device" in result["stderr"]
        size = daemon.exec(sandbox, ["stat", "-c", "%s", "/dev/shm/fill"])["stdout"]
        assert int(size) == 8 * MIB


def test_nowhere_else_can_be_written_without_bound(daemon: Daemon):
    """Every file system a sandbox can write to is small or counted as its own."""
    with daemon.sandbox("busybox", limits={"disk_mb": 4, "shm_mb": 4, "memory_mb": 64}) as sandbox:
        mounts = daemon.exec(sandbox, ["cat", "/proc/mounts"])["stdout"].splitlines()
        for line in mounts:
            _, place, kind, options, *_ = line.split()
            if kind not in ("tmpfs", "devtmpfs", "overlay") or options.startswith("ro,"):
                continue
            fill = (
                f"cd {place} && dd if=/dev/zero of=fill-it bs=1M count=64; ls fill-it && rm fill-it"
            )
            result = daemon.exec(sandbox, fill)
            assert result["oom_killed"] is False
            if result["exit_code"] == 0:
                assert "No space left" in result["stderr"], line


def test_open_files_are_bounded_for_each_process(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"nofile": 64}) as sandbox:
        assert daemon.exec(sandbox, "ulimit -Sn; ulimit -Hn")["stdout"] == "64\n64\n"
        raised = daemon.exec(sandbox, "ulimit -n 65", user="agent")
        assert raised["exit_code"] != 0


def cgroup_files(pid_inside_marker: int, controller: str, names: dict[str, str]) -> dict[str, str]:
    """The limit files of the cgroup that a process is in, in v1 (by `controller`) or in v2."""
    for line in Path(f"/proc/{pid_inside_marker}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            version = "v1"
        elif not controllers:
            version = "v2"
        else:
            continue
        for mount in host_state.cgroup_mounts():
            for below in (mount / path.lstrip("/"), (mount / path.lstrip("/")).parent):
                file = below / names[version]
                has = (mount / "cgroup.procs").exists() and file.exists()
                if has and (version == "v2") == (mount / "cgroup.controllers").exists():
                    return {version: file.read_text().strip()}
    raise AssertionError(f"no {controller} limit found for pid {pid_inside_marker}")


def test_the_limits_are_in_the_kernels_own_files(daemon: Daemon):
    marker = new_marker()
    limits = {"cpus": 0.5, "memory_mb": 64, "disk_mb": 32, "pids": 40}
    with daemon.sandbox("busybox", limits=limits) as sandbox:
        daemon.exec(sandbox, f"sleep {marker} & true")
        (pid,) = pids_with(marker)
        memory = cgroup_files(pid, "memory", {"v1": "memory.limit_in_bytes", "v2": "memory.max"})
        assert set(memory.values()) == {str((64 + 32 + RESERVE_MIB) * MIB)}
        pids = cgroup_files(pid, "pids", {"v1": "pids.max", "v2": "pids.max"})
        assert set(pids.values()) == {"41"}  # PID 1 is one of them
        quota = cgroup_files(pid, "cpu", {"v1": "cpu.cfs_quota_us", "v2": "cpu.max"})
        period = cgroup_files(pid, "cpu", {"v1": "cpu.cfs_period_us", "v2": "cpu.max"})
        allowed = int(next(iter(quota.values())).split()[0])
        every = int(next(iter(period.values())).split()[-1])
        assert allowed / every == pytest.approx(0.5, rel=0.01)
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 500
        assert status_of(pid)["Uid"].split()[0] != "0"


def test_half_a_cpu_is_half_a_cpu(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"cpus": 0.25}) as sandbox:
        result = daemon.exec(sandbox, "while :; do :; done", timeout_s=4, grace_s=0)
        used = result["cpu_user_s"] + result["cpu_system_s"]
        # Not about speed: the share that the kernel gave, with a period of grace at each end.
        assert used / result["wall_s"] < 0.35


def test_the_node_says_how_each_limit_is_held(daemon: Daemon):
    node = daemon.http.get("/v1/node").json()
    held = {
        "cpus", "memory_mb", "disk_mb", "inodes", "pids", "nofile", "shm_mb", "cpuset",
        "cpu_weight",
    }  # fmt: skip
    no_device = {"io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops"}
    assert node["enforcement"] == dict.fromkeys(held, "enforced") | dict.fromkeys(no_device, "none")


def test_a_core_dump_starts_nothing_on_the_host(daemon: Daemon, sandbox: str):
    limits = daemon.exec(sandbox, ["cat", "/proc/self/limits"])["stdout"]
    core = re.search(r"Max core file size +(\d+) +(\d+)", limits)
    assert core is not None
    # core(5): of 1 byte, as a pattern that is a pipe is started in spite of 0.
    assert core.groups() == ("1", "1")
    assert daemon.exec(sandbox, "kill -ABRT $$")["exit_code"] == 134
