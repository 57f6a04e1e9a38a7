"""Settings of the running kernel: none can be changed, and what is masked tells nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxd.rootfs import skeleton
from tests.framework import times
from tests.security.probing import Host, Inside

_SETTINGS = """
kernel/core_pattern kernel/hostname kernel/domainname kernel/modprobe kernel/hotplug
kernel/panic kernel/sysrq kernel/randomize_va_space kernel/shmmax kernel/shmall kernel/msgmni
kernel/sem kernel/pid_max kernel/threads-max kernel/kptr_restrict kernel/dmesg_restrict
kernel/perf_event_paranoid kernel/unprivileged_bpf_disabled kernel/ns_last_pid kernel/printk
kernel/random/uuid kernel/random/write_wakeup_threshold kernel/keys/maxkeys
vm/overcommit_memory vm/drop_caches vm/swappiness vm/panic_on_oom vm/oom_kill_allocating_task
fs/file-max fs/nr_open fs/suid_dumpable fs/protected_symlinks fs/protected_hardlinks
fs/inotify/max_user_instances fs/mqueue/queues_max fs/pipe-user-pages-soft fs/binfmt_misc/register
user/max_user_namespaces user/max_mnt_namespaces user/max_inotify_instances
net/ipv4/ip_forward net/ipv4/ping_group_range net/ipv4/ip_unprivileged_port_start
net/core/somaxconn net/ipv4/tcp_mem net/ipv6/conf/all/forwarding
debug/exception-trace dev/tty/legacy_tiocsti abi/vsyscall32
"""
WALLS = {"EROFS", "EACCES", "EPERM", "ENOENT"}
CLOSED = {"EACCES", "EPERM", "ENOENT"}


@pytest.mark.parametrize("setting", _SETTINGS.split())
def test_setting_cannot_be_opened_for_writing(setting: str, inside: Inside) -> None:
    assert inside.ask(f"open_w:/proc/sys/{setting}") in WALLS


def test_control_settings_open_for_writing_on_the_host(host: Host) -> None:
    assert host.ask("open_w:/proc/sys/kernel/core_pattern").startswith("ok")
    assert host.ask("open_w:/proc/sys/vm/swappiness").startswith("ok")


def test_no_file_below_proc_can_be_opened_for_writing(inside: Inside, host: Host) -> None:
    """Every one there is, found by walking; the processes' own are for other tests."""
    answer = inside.run(["/probes/probe", "writable:/proc"], timeout_s=times.scaled(100))
    assert "writable:/proc ok 0\n" in answer["stdout"], answer["stderr"]
    assert int(host.ask("writable:/proc/sys/vm").removeprefix("ok ")) > 0


def test_no_file_below_sys_can_be_opened_for_writing(inside: Inside, host: Host) -> None:
    answer = inside.run(["/probes/probe", "writable:/sys"], timeout_s=times.scaled(100))
    assert "writable:/sys ok 0\n" in answer["stdout"], answer["stderr"]
    assert int(host.ask("writable:/sys/kernel/mm").removeprefix("ok ")) > 0


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sysrq-trigger",
        "/proc/irq/default_smp_affinity",
        "/proc/bus/pci/00/00.0",
        "/proc/fs/nfsd/threads",
        "/proc/mtrr",
        "/proc/kcore",
        "/proc/kmsg",
        "/proc/timer_stats",
        "/proc/acpi/wakeup",
        "/proc/scsi/scsi",
        "/proc/pressure/memory",
        "/proc/self/net/pktgen/pgctrl",
        "/sys/power/state",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/kernel/mm/ksm/run",
        "/sys/kernel/uevent_helper",
        "/sys/kernel/profiling",
        "/sys/kernel/debug/tracing/trace",
        "/sys/kernel/tracing/trace",
        "/sys/module/printk/parameters/time",
        "/sys/fs/cgroup/cgroup.procs",
        "/sys/fs/fuse/connections/1/abort",
        "/sys/devices/system/cpu/cpu0/online",
        "/sys/devices/system/cpu/cpu1/online",
        "/sys/class/net/lo/mtu",
        "/sys/bus/pci/rescan",
        "/sys/block/loop0/queue/scheduler",
    ],
)
def test_control_file_cannot_be_opened_for_writing(path: str, inside: Inside) -> None:
    assert inside.ask(f"open_w:{path}") in WALLS


@pytest.mark.parametrize("path", ["/proc", "/sys", "/proc/sys", "/proc/sys/kernel", "/sys/kernel"])
def test_nothing_can_be_made_among_the_kernels_files(path: str, inside: Inside) -> None:
    assert inside.ask(f"create:{path}/new") in WALLS
    assert inside.ask(f"mkdir:{path}/new") in WALLS


@pytest.mark.parametrize("path", [f"/{name}" for name in skeleton.masked_paths(2)])
def test_masked_path_tells_nothing(path: str, inside: Inside) -> None:
    """Neither as a file nor as a directory: where there is one, it is empty and closed."""
    assert inside.ask(f"read:{path}") in CLOSED
    assert inside.ask(f"list:{path}") in CLOSED | {"ENOTDIR"}
    assert inside.ask(f"open_w:{path}") in WALLS | {"EISDIR"}


def test_masks_are_there(as_root: Inside) -> None:
    """Of those paths that this kernel has, each is covered."""
    covered = as_root.shell("cut -d' ' -f5 /proc/self/mountinfo").split()
    for name in skeleton.MASKED:
        if Path("/", name).exists():
            assert f"/{name}" in covered


def test_control_masked_paths_can_be_read_on_the_host(host: Host) -> None:
    assert host.ask("read:/proc/interrupts").startswith("ok")
    assert host.ask("read:/proc/timer_list").startswith("ok")


@pytest.mark.parametrize("path", [f"/{name}" for name in skeleton.READONLY])
def test_readonly_path_is_readonly(path: str, inside: Inside) -> None:
    assert inside.ask(f"open_w:{path}") in WALLS | {"EISDIR"}
    assert inside.ask(f"chmod:{path}") in WALLS
    assert inside.ask(f"truncate:{path}") in WALLS | {"EISDIR", "EINVAL"}


@pytest.mark.parametrize("path", [f"/{name}" for name in skeleton.READONLY if name != "proc/bus"])
def test_readonly_mount_is_told_as_such(path: str, as_root: Inside) -> None:
    line = as_root.shell(f"grep ' {path} ' /proc/self/mountinfo")
    assert not Path(path).exists() or " ro," in line, line


@pytest.mark.parametrize("name", ["kpagecount", "kpageflags", "vmallocinfo", "slabinfo", "kmsg"])
def test_kernel_memory_files_are_closed(name: str, inside: Inside) -> None:
    assert inside.ask(f"open_r:/proc/{name}") in CLOSED


def test_control_the_sandboxs_own_files_open(inside: Inside) -> None:
    assert inside.ask("open_w:/dev/null").startswith("ok")
    assert inside.ask("read:/proc/self/stat").startswith("ok")
    assert inside.ask("read:/proc/sys/kernel/pid_max").startswith("ok")
