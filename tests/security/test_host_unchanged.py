"""The host, before and after a sandbox that tries everything at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework import host_state, times
from tests.framework.daemon import Daemon
from tests.security.probing import Inside

# Which the kernel itself, or other work on the host, changes all the time.
MOVING = (
    "/proc/sys/fs/dentry-state",
    "/proc/sys/fs/file-nr",
    "/proc/sys/fs/inode-nr",
    "/proc/sys/fs/inode-state",
    "/proc/sys/fs/quota/",
    "/proc/sys/fs/aio-nr",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/sys/kernel/random/",
    "/proc/sys/kernel/pty/nr",
    "/proc/sys/kernel/sched_domain/",
    "/proc/sys/kernel/tainted",
    "/proc/sys/net/netfilter/nf_conntrack_count",
    "/proc/sys/vm/stat_refresh",
    "/proc/sys/net/ipv4/route/flush",
)


def sysctls() -> dict[str, str]:
    """Every setting that can be read, by path."""
    found = {}
    for directory, _, files in os.walk("/proc/sys"):
        for name in files:
            path = os.path.join(directory, name)
            if not path.startswith(MOVING):
                with contextlib.suppress(OSError):
                    found[path] = Path(path).read_text(errors="replace")
    return found


def nft() -> str:
    program = shutil.which("nft")
    if program is None:
        return ""
    listed = subprocess.run(
        [program, "list", "ruleset"], capture_output=True, text=True, check=False
    )
    return listed.stdout


def picture(daemon: Daemon) -> dict[str, object]:
    routes = [Path(f"/proc/net/{name}").read_text() for name in ("route", "ipv6_route")]
    stable = [[line.split()[:5] for line in table.splitlines()] for table in routes]
    own = str(daemon.runtime_dir.parent.name)
    return {
        "sysctls": sysctls(),
        "mounts": sorted(
            line.partition(" - ")[0].split()[4]
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ),
        "routes": stable,
        "links": sorted(name for name in os.listdir("/sys/class/net")),
        "addresses": Path("/proc/net/if_inet6").read_text(),
        "nft": nft(),
        "cgroups": sorted(
            str(path)
            for mount in host_state.cgroup_mounts()
            for path in mount.glob("*")
            if path.is_dir() and own in path.name
        ),
        "limits of hostd": Path(f"/proc/{daemon.pid}/limits").read_text(),
        "hostname": os.uname().nodename,
        "devices": sorted(name for name in os.listdir("/dev") if not name.startswith("fd")),
        "core pattern": Path("/proc/sys/kernel/core_pattern").read_text(),
        "root": sorted(os.listdir("/")),
    }


@pytest.fixture
def unchanged(daemon: Daemon) -> Iterator[None]:
    before = picture(daemon)
    yield
    after = picture(daemon)
    for name, value in before.items():
        assert after[name] == value, name


WORDS = """
mount umount2 pivot_root setns bpf io_uring_setup kexec_load init_module reboot swapon acct
clock_settime sethostname setdomainname syslog perf_event_open unshare:10000000 unshare:40000000
link_add route_add address_add umount:/proc/sys remount:/proc/sys mount_tmpfs:/tmp shared:/
open_w:/proc/sysrq-trigger open_w:/proc/sys/kernel/core_pattern open_w:/proc/sys/vm/drop_caches
open_w:/sys/power/state mknod_c:1,1,/tmp/mem mknod_b:8,0,/tmp/disk chmod:/dev/null chown:/dev/null
kill:1,9 signal_storm:1000 ptrace_seize:1 prlimit_set:1 renice:1 affinity:1 nice:-20 scheduler:1
"""


@pytest.mark.usefixtures("unchanged")
def test_host_is_as_it_was_after_every_try_at_once(
    daemon: Daemon, hostile: str, identity: str
) -> None:
    attacker = Inside(daemon, hostile, identity)
    answer = attacker.run(["/probes/probe", *WORDS.split()], timeout_s=times.scaled(60))
    answers = answer["stdout"].splitlines()
    allowed = [line for line in answers if " ok" in line]
    assert len(answers) == len(WORDS.split())
    assert {line.split()[0] for line in allowed} <= {"kill:1,9", "signal_storm:1000"}
    script = """
        echo hostile >/proc/sys/kernel/hostname; hostname hostile; date -s 2001-01-01
        echo b >/proc/sysrq-trigger; mount -t proc proc /tmp; ip link add x type dummy
        sysctl -w vm.swappiness=1; sync; rm -rf /etc/* /tmp/*; reboot -f; poweroff -f
    """
    attacker.shell(f"({script}) 2>/dev/null")


@pytest.mark.usefixtures("unchanged")
def test_host_is_as_it_was_after_a_sandbox_that_filled_everything(
    daemon: Daemon, hostile: str
) -> None:
    attacker = Inside(daemon, hostile, "root")
    for mode in ("inflight", "pipes", "inotify", "queues", "ptys", "semaphores", "shm", "dev_shm"):
        attacker.hold(mode, 20_000)


def test_control_the_picture_sees_a_change(daemon: Daemon, tmp_path: Path) -> None:
    before = picture(daemon)
    assert len(before["sysctls"]) > 300
    assert before == picture(daemon)
    os.mkdir("/sandboxd-test-picture")
    try:
        assert before != picture(daemon)
    finally:
        os.rmdir("/sandboxd-test-picture")
    del tmp_path
