"""The proc views: one sandbox's files, to be read and no more, and a server that stays standing."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.framework import times
from tests.framework.daemon import Daemon
from tests.security.probing import Inside, alive, install

FILES = (
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/stat",
    "/proc/loadavg",
    "/proc/uptime",
    "/proc/swaps",
    "/proc/diskstats",
    "/sys/devices/system/cpu/online",
)
CPU = "/sys/devices/system/cpu"


@pytest.mark.parametrize("path", FILES)
def test_view_is_read_only(inside: Inside, path: str) -> None:
    assert inside.ask(f"open_r:{path}").startswith("ok")
    assert inside.ask(f"open_w:{path}") in ("EROFS", "EACCES")


def test_nothing_is_made_removed_or_changed(as_root: Inside) -> None:
    script = f"""
        touch {CPU}/new; mkdir {CPU}/dir; rm -f {CPU}/online; mv {CPU}/online {CPU}/o
        ln -s /etc {CPU}/link; chmod 777 /proc/meminfo; chown 1:1 {CPU}; truncate -s 0 /proc/stat
        ls {CPU}; stat -c %a:%u /proc/meminfo"""
    before = as_root.shell(f"ls {CPU}; stat -c %a:%u /proc/meminfo 2>/dev/null")
    assert as_root.shell(f"({script}) 2>/dev/null") == before
    assert "online" in before


def test_mounts_are_closed(as_root: Inside) -> None:
    lines = [
        line
        for line in as_root.shell("cat /proc/self/mountinfo").splitlines()
        if " fuse.views " in line
    ]
    assert len(lines) == 10
    for line in lines:
        assert {"ro", "nosuid", "nodev", "noexec"} <= set(line.split()[5].split(","))
        assert " ro," in line.rpartition(" - ")[2]


def test_nothing_else_is_reached_through_a_view(as_root: Inside) -> None:
    """Above the directory of CPUs lies the sandbox's own /sys, not the server's root."""
    above = as_root.shell(f"ls {CPU}/..; cd {CPU}/..; pwd -P")
    assert above.split()[-1] == "/sys/devices/system"
    assert "meminfo" not in above
    found = as_root.shell(f"find {CPU} -type f | wc -l; find {CPU} ! -type f ! -type d | wc -l")
    files, others = (int(n) for n in found.split())
    assert files >= 16
    assert others == 0


def test_views_cannot_be_taken_off(as_root: Inside) -> None:
    before = as_root.shell("head -n1 /proc/meminfo")
    as_root.shell(f"umount /proc/meminfo; umount -l {CPU}; mount -o remount,rw /proc/meminfo; :")
    assert as_root.shell("head -n1 /proc/meminfo") == before


def test_control_such_mounts_can_be_taken_off_by_the_hosts_root() -> None:
    """The umount that a sandbox is refused works where it is allowed."""
    script = "mount --bind /proc/uptime /proc/meminfo && umount /proc/meminfo && echo taken"
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "taken"


def test_names_of_views_differ_and_mean_nothing(daemon: Daemon, as_root: Inside) -> None:
    def name(text: str) -> str:
        found = re.search(r" /([0-9a-f]{16})/meminfo ", text)
        assert found is not None, text
        return found[1]

    own = name(as_root.shell("cat /proc/self/mountinfo"))
    with daemon.sandbox("busybox") as other:
        theirs = name(daemon.exec(other, "cat /proc/self/mountinfo")["stdout"])
    assert own != theirs


def test_a_sandbox_that_reads_in_a_loop_holds_up_nobody(daemon: Daemon, hostile: str) -> None:
    """Its readers wait for their turn; a neighbour's reads and the launcher's watch do not."""
    loop = "while :; do cat /proc/meminfo /proc/stat; done"
    hammer = f"i=0; while [ $i -lt 100 ]; do ({loop}) >/dev/null 2>&1 & i=$((i+1)); done; sleep 5"
    answer = daemon.http.post(f"/v1/sandboxes/{hostile}/processes", json={"command": hammer})
    assert answer.is_success, answer.text
    with daemon.sandbox("busybox") as neighbour:
        script = "i=0; while [ $i -lt 50 ]; do head -n1 /proc/meminfo; i=$((i+1)); done"
        result = daemon.exec(neighbour, script, timeout_s=times.scaled(60))
        assert result["exit_code"] == 0
        assert len(set(result["stdout"].splitlines())) == 1
    features = daemon.http.get("/v1/node").json()["features"]
    assert features["proc_views"] == "serving"
    alive(daemon, hostile)


def test_sandboxes_that_read_together_hold_up_nobody(
    daemon: Daemon, programs: dict[str, Path]
) -> None:
    """However many wait for their turn, a neighbour does not stand in line behind them: its reads
    are over before one of theirs has had a few answers."""
    limits = {"pids": 4100, "memory_mb": 512, "disk_mb": 16}
    asked = "s() { stat -c %s /tmp/asked; }"
    with ExitStack() as stack:
        several = [stack.enter_context(daemon.sandbox("busybox", limits=limits)) for _ in range(2)]
        for one in several:
            install(daemon, one, programs)
            assert Inside(daemon, one, "root").hold("readers", 4000) == (4000, "enough")
        # From here on all of them wait: what may be asked at once is used up.
        begun = f"{asked}; n=$(s); until [ $(s) -gt $((n + 2)) ]; do usleep 20000; done; s"
        before = int(daemon.exec(several[0], begun, timeout_s=60)["stdout"])
        neighbour = stack.enter_context(daemon.sandbox("busybox"))
        script = "i=0; while [ $i -lt 20 ]; do head -n1 /proc/meminfo; i=$((i+1)); done"
        result = daemon.exec(neighbour, script, timeout_s=120)
        assert (result["exit_code"], len(result["stdout"].splitlines())) == (0, 20)
        assert int(daemon.exec(several[0], f"{asked}; s")["stdout"]) - before < 5
    features = daemon.http.get("/v1/node").json()["features"]
    assert features["proc_views"] == "serving"


def test_files_held_open_are_read_on(daemon: Daemon, hostile: str) -> None:
    """The server keeps nothing for an open file that a sandbox could pile up."""
    script = """
        for n in $(seq 200); do sleep 1000 </proc/meminfo & done
        for pid in /proc/[0-9]*; do readlink $pid/fd/0; done | grep -c meminfo
        head -n1 /proc/meminfo; kill $(jobs -p)"""
    result = daemon.exec(hostile, script, timeout_s=times.scaled(60))
    held, total = result["stdout"].splitlines()
    assert int(held) == 200
    assert total.split()[0] == "MemTotal:"
    alive(daemon, hostile)
