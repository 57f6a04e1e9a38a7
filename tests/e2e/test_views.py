"""What programs in a sandbox take for the machine: its own CPUs and memory, and nobody else's."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.at_once import at_once
from tests.e2e.host_processes import family_with, status_of
from tests.e2e.restarts import started_again
from tests.framework import images, times
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

StartDaemon = Callable[..., Daemon]
ALLOWED = sorted(os.sched_getaffinity(0))
PACKAGES = ("python3-minimal", "python3-psutil", "procps")
LIMITS = {"cpus": 0.5, "memory_mb": 256, "disk_mb": 64}


# The first of them builds the image, which is kept.
BUILDS_IMAGE = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def debian(leak_check: LeakCheck) -> Iterator[Daemon]:
    with running_daemon(leak_check, {"debian": images.debian_image(PACKAGES)}) as daemon:
        daemon.warm_up("debian")
        yield daemon


def shell(daemon: Daemon, sandbox: str, script: str) -> str:
    result = daemon.exec(sandbox, script)
    assert (result["exit_code"], result["stderr"]) == (0, ""), result
    return str(result["stdout"])


def kb(text: str, name: str) -> int:
    found = re.search(rf"^{re.escape(name)}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def test_the_node_says_that_it_serves_views(daemon: Daemon) -> None:
    assert daemon.http.get("/v1/node").json()["features"]["proc_views"] == "serving"


# By each way in which a program may read: read(2) as grep does, sendfile(2) as busybox's cat
# does, small pieces, seeking back.
@pytest.mark.parametrize(
    "read",
    [
        "grep ''",
        "cat",
        "dd bs=7 2>/dev/null <",
        "exec 3<{}; head -c 5 <&3 >/dev/null; exec 3<&-; tail -n +1",
    ],
)
def test_a_file_is_whole_however_it_is_read(daemon: Daemon, sandbox: str, read: str) -> None:
    for path in ("/proc/meminfo", "/proc/cpuinfo", "/proc/swaps"):
        text = shell(daemon, sandbox, f"{read.format(path)} {path}")
        expected = shell(daemon, sandbox, f"sed -n p {path}")
        assert text.splitlines()[0] == expected.splitlines()[0]
        assert len(text.splitlines()) == len(expected.splitlines())


def test_a_shell_that_reads_byte_by_byte_asks_once(daemon: Daemon, sandbox: str) -> None:
    """As busybox and dash do. Were each byte a request, the allowance of this sandbox would be used
    up after two files, and the rest would take minutes."""
    script = (
        "n=0; while [ $n -lt 40 ]; do while read x; do :; done </proc/meminfo; n=$((n+1)); done"
    )
    result = daemon.exec(sandbox, f"{script}; echo $x$n", timeout_s=60)
    assert (result["exit_code"], result["stdout"]) == (0, "40\n"), result


def test_memory_is_the_limit(daemon: Daemon) -> None:
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        text = shell(daemon, sandbox, "cat /proc/meminfo")
        assert kb(text, "MemTotal") == 256 * 1024
        assert kb(text, "MemAvailable") > 230 * 1024
        assert kb(text, "SwapTotal") == 0


def test_used_memory_is_the_sandboxs_own(daemon: Daemon) -> None:
    """/dev/shm is memory, also for these figures, once it is more than the disk could hold."""
    with daemon.sandbox("busybox", limits={**LIMITS, "disk_mb": 1}) as sandbox:
        before = shell(daemon, sandbox, "cat /proc/meminfo")
        shell(daemon, sandbox, "head -c 50331648 /dev/zero >/dev/shm/x")
        after = shell(daemon, sandbox, "cat /proc/meminfo")
    assert kb(after, "Shmem") - kb(before, "Shmem") == pytest.approx(47 * 1024, abs=1024)
    assert kb(before, "MemFree") - kb(after, "MemFree") == pytest.approx(47 * 1024, abs=2048)
    assert kb(before, "MemAvailable") - kb(after, "MemAvailable") > 40 * 1024


def test_a_full_disk_is_no_used_memory(daemon: Daemon) -> None:
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        before = shell(daemon, sandbox, "cat /proc/meminfo")
        shell(daemon, sandbox, "head -c 50331648 /dev/zero >/tmp/x")
        after = shell(daemon, sandbox, "cat /proc/meminfo")
    assert kb(before, "MemFree") - kb(after, "MemFree") < 4096
    assert kb(after, "Shmem") == 0


@pytest.mark.parametrize(("cpus", "count"), [(0.5, 1), (1, 1), (1.5, 2), (64, 64)])
def test_cpus_are_the_limit_everywhere(daemon: Daemon, cpus: float, count: int) -> None:
    count = min(count, len(ALLOWED))
    with daemon.sandbox("busybox", limits={**LIMITS, "cpus": cpus}) as sandbox:
        assert shell(daemon, sandbox, "nproc").strip() == str(count)
        assert shell(daemon, sandbox, "grep -c ^processor /proc/cpuinfo").strip() == str(count)
        assert shell(daemon, sandbox, "grep -c '^cpu[0-9]' /proc/stat").strip() == str(count)
        directory = "/sys/devices/system/cpu"
        assert len(shell(daemon, sandbox, f"ls -d {directory}/cpu[0-9]*").split()) == count
        # The same ones in each, and those that the kernel schedules it on.
        allowed = shell(daemon, sandbox, "grep Cpus_allowed_list /proc/self/status").split()[1]
        for name in ("online", "possible", "present"):
            assert shell(daemon, sandbox, f"cat {directory}/{name}").strip() == allowed


def test_sandboxes_are_spread_over_the_cpus(start_daemon: StartDaemon) -> None:
    if len(ALLOWED) < 2:
        pytest.skip("one CPU")
    daemon = start_daemon()
    found = set()
    with (
        daemon.sandbox("busybox", limits=LIMITS) as a,
        daemon.sandbox("busybox", limits=LIMITS) as b,
    ):
        for sandbox in (a, b):
            found.add(shell(daemon, sandbox, "grep Cpus_allowed_list /proc/self/status"))
    assert len(found) == 2


def test_cgroup_files_say_the_limits(daemon: Daemon) -> None:
    """Where programs look: the root, the command's own cgroup, and v1's directories."""
    limits = {"cpus": 1.5, "memory_mb": 300, "disk_mb": 64, "pids": 77, "cpu_weight": 400}
    script = """
        own=/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)
        for d in /sys/fs/cgroup "$own"; do
            (cd "$d" && cat memory.max cpu.max cpu.weight pids.max)
        done
        cd /sys/fs/cgroup
        cat memory/memory.limit_in_bytes cpu/cpu.cfs_quota_us cpu/cpu.shares pids/pids.max
    """
    v2, v1 = ["314572800", "150000 100000", "400", "77"], ["314572800", "150000", "4096", "77"]
    with daemon.sandbox("busybox", limits=limits) as sandbox:
        assert shell(daemon, sandbox, script).splitlines() == [*v2, *v2, *v1]
        cpus = "cd /sys/fs/cgroup; cat cpuset.cpus cpuset/cpuset.effective_cpus"
        online = shell(daemon, sandbox, "cat /sys/devices/system/cpu/online")
        assert shell(daemon, sandbox, cpus) == 2 * online
        # Of a file system that is there: programs size buffers by these.
        assert shell(daemon, sandbox, "stat -f -c '%s %l' /sys/fs/cgroup") == "4096 255\n"
        hierarchies = shell(daemon, sandbox, "tail -n +2 /proc/cgroups | cut -f 2").split()
        assert set(hierarchies) == {"0"}


def test_used_memory_in_cgroup_files_is_the_sandboxs_own(daemon: Daemon) -> None:
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        script = "cat /sys/fs/cgroup/memory.current; head -c 20m /dev/zero | tail -c 20m | "
        script += "(sleep 1; cat /sys/fs/cgroup/memory.current; cat >/dev/null)"
        before, beside = map(int, shell(daemon, sandbox, script).split())
        assert before < 8 << 20
        assert 20 << 20 < beside < 40 << 20


def test_cgroup_files_outlive_their_server(start_daemon: StartDaemon) -> None:
    """While there is none the mask shows: an empty directory."""
    daemon = start_daemon()
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        for _ in range(2):
            (server,) = family_with(daemon.refresh_family(), "sandboxd.views")
            os.kill(server, signal.SIGKILL)
            deadline = time.monotonic() + times.scaled(20)
            while True:
                told = daemon.exec(sandbox, "cd /sys/fs/cgroup; ls . | wc -l; cat memory.max")
                count, *most = told["stdout"].split()
                assert count == "0" or int(count) > 10
                if most:
                    break
                assert time.monotonic() < deadline
            assert most == [str(256 << 20)]
            assert family_with(daemon.refresh_family(), "sandboxd.views") != [server]


def test_uptime_begins_with_the_sandbox(daemon: Daemon) -> None:
    with daemon.sandbox("busybox") as sandbox:
        up, idle = (float(x) for x in shell(daemon, sandbox, "cat /proc/uptime").split())
        assert 0 <= up < 60
        assert 0 <= idle <= up * len(ALLOWED)
        later = float(shell(daemon, sandbox, "sleep 1; cat /proc/uptime").split()[0])
        assert later >= up + 1


def test_cpu_time_of_a_busy_sandbox_shows(daemon: Daemon) -> None:
    with daemon.sandbox("busybox", limits={**LIMITS, "cpus": 1}) as sandbox:
        busy = "while [ $(awk 'NR == 1 { print $2 + $4 }' /proc/stat) -lt 100 ]; do :; done"
        text = shell(daemon, sandbox, f"{busy}; cat /proc/stat /proc/loadavg")
    user, _, system, idle, *_ = (int(x) for x in text.splitlines()[0].split()[1:])
    assert user + system >= 100
    assert idle >= 0
    assert float(text.splitlines()[-1].split()[0]) > 0


def test_one_view_is_not_anothers(daemon: Daemon) -> None:
    sizes = [64, 96, 128, 160]
    made = [daemon.create("busybox", limits={"memory_mb": size}) for size in sizes]

    def total(sandbox: str) -> int:
        return kb(daemon.exec(sandbox, "cat /proc/meminfo")["stdout"], "MemTotal")

    try:
        assert at_once(total, made * 5, threads=8) == [size * 1024 for size in sizes] * 5
    finally:
        for sandbox in made:
            daemon.delete(sandbox)


def test_first_read_of_many_new_sandboxes_is_right(daemon: Daemon) -> None:
    """The server is told of a sandbox while it is made: who reads at once waits for that."""

    def total(number: int) -> int:
        with daemon.sandbox("busybox", limits={"memory_mb": 100 + number}) as sandbox:
            return kb(daemon.exec(sandbox, "cat /proc/meminfo")["stdout"], "MemTotal")

    assert at_once(total, range(24), threads=6) == [(100 + n) * 1024 for n in range(24)]


def test_views_after_a_reset_begin_anew(daemon: Daemon) -> None:
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        before = float(shell(daemon, sandbox, "sleep 1.5; cat /proc/uptime").split()[0])
        answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/reset")
        assert answer.is_success, answer.text
        text = shell(daemon, sandbox, "cat /proc/uptime /proc/meminfo; nproc")
        assert float(text.split()[0]) < before
        assert kb(text, "MemTotal") == 256 * 1024
        assert text.split()[-1] == "1"


def test_views_outlive_a_daemon(start_daemon: StartDaemon) -> None:
    """What shows them is of the node; a daemon that comes back finds them as they were."""
    daemon = start_daemon()
    sandbox = daemon.create("busybox", limits=LIMITS)
    script = "cat /proc/meminfo; nproc"
    before = shell(daemon, sandbox, script)
    daemon.kill()
    with started_again(daemon) as again:
        if again.http.get(f"/v1/sandboxes/{sandbox}").status_code == 200:
            after = shell(again, sandbox, script)
            assert kb(after, "MemTotal") == kb(before, "MemTotal")
        with again.sandbox("busybox", limits=LIMITS) as fresh:
            assert kb(shell(again, fresh, script), "MemTotal") == 256 * 1024


def test_views_of_a_snapshot_are_the_new_sandboxs(daemon: Daemon) -> None:
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})
        assert answer.is_success, answer.text
        # Its own root was swapped under it.
        assert kb(shell(daemon, sandbox, "cat /proc/meminfo"), "MemTotal") == 256 * 1024
        snapshot = answer.json()["id"]
        made = daemon.http.post(
            "/v1/sandboxes", json={"snapshot": snapshot, "limits": {**LIMITS, "memory_mb": 128}}
        )
        assert made.is_success, made.text
        other = made.json()["id"]
        assert kb(shell(daemon, other, "cat /proc/meminfo"), "MemTotal") == 128 * 1024
        daemon.delete(other)
        assert daemon.http.delete(f"/v1/snapshots/{snapshot}").is_success


def test_without_views_the_hosts_files_show_and_the_node_says_so(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(environment={"SANDBOXD_PROC_VIEWS": "false"})
    assert daemon.http.get("/v1/node").json()["features"]["proc_views"] == "off"
    assert family_with(daemon.refresh_family(), "sandboxd.views") == []
    with daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        text = shell(daemon, sandbox, "cat /proc/meminfo; nproc")
        assert kb(text, "MemTotal") == kb(Path("/proc/meminfo").read_text(), "MemTotal")
        assert text.split()[-1] == str(len(ALLOWED))


# --- programs of a distribution ------------------------------------------------------------------

PSUTIL = """
import json, os, psutil
memory, swap = psutil.virtual_memory(), psutil.swap_memory()
print(json.dumps({
    "total": memory.total, "available": memory.available, "used": memory.used,
    "percent": memory.percent, "swap": swap.total, "logical": psutil.cpu_count(),
    "physical": psutil.cpu_count(logical=False), "python": os.cpu_count(),
    "affinity": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0] >= 0,
    "times": len(psutil.cpu_times(percpu=True)), "disks": psutil.disk_io_counters(perdisk=True),
}))
"""


@BUILDS_IMAGE
def test_psutil_and_python_see_the_limits(debian: Daemon) -> None:
    with debian.sandbox("debian", limits=LIMITS) as sandbox:
        result = debian.exec(sandbox, ["python3", "-c", PSUTIL])
        assert result["exit_code"] == 0, result
        found = json.loads(result["stdout"])
    assert found["total"] == 256 * 1024 * 1024
    assert 0 < found["used"] < 100 * 1024 * 1024
    assert found["available"] <= found["total"]
    assert 0 <= found["percent"] < 50
    assert found["swap"] == 0
    counts = [found[name] for name in ("logical", "physical", "python", "affinity", "times")]
    assert counts == [1] * 5
    assert found["disks"] == {}


@BUILDS_IMAGE
def test_procps_sees_the_limits(debian: Daemon) -> None:
    with debian.sandbox("debian", limits=LIMITS) as sandbox:
        total, used, free, _, cache, available = (
            int(x) for x in shell(debian, sandbox, "free -m").splitlines()[1].split()[1:]
        )
        assert total == 256
        assert used + free + cache in range(250, 263)
        assert available <= total
        top = shell(debian, sandbox, "top -bn1")
        assert re.search(r"MiB Mem :\s+256\.0 total", top)
        assert re.search(r"MiB Swap:\s+0\.0 total", top)
        assert "up 0 min" in shell(debian, sandbox, "uptime")
        vmstat = shell(debian, sandbox, "vmstat").splitlines()[-1].split()
        assert sum(int(x) for x in vmstat[12:15]) == 100
        assert int(shell(debian, sandbox, "nproc")) == 1


def test_server_is_nobody(daemon: Daemon) -> None:
    (server,) = family_with(daemon.refresh_family(), "sandboxd.views")
    status = status_of(server)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"]) == ("1", "2", "")
    assert all(int(uid) > 65_535 for uid in status["Uid"].split())
    assert os.listdir(f"/proc/{server}/root/") == []
    # One FUSE descriptor, and nobody else has a copy of it.
    holders = [
        pid
        for pid in daemon.refresh_family()
        if "/dev/fuse" in [os.readlink(f.path) for f in os.scandir(f"/proc/{pid}/fd")]
        and not family_with({pid}, "squashfuse")
    ]
    assert holders == [server]
