"""What PID 1 is told to hide, to make read-only and to set in its own namespaces.

The lists are those every container runtime agrees on (OCI runtime defaults), with what is known of
this kernel: each entry says what it would give away. A path that a kernel does not have is passed
over by PID 1; one that cannot be masked refuses the sandbox.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Final

from sandboxd.model import KernelCaps, Limits

MASKED: Final = (
    "proc/acpi",  # power and thermal state of the host
    "proc/asound",  # its sound devices
    "proc/interrupts",  # keystroke and network timing
    "proc/kallsyms",  # kernel addresses
    "proc/kcore",  # kernel memory
    "proc/keys",  # keyrings, also of other users
    "proc/latency_stats",
    "proc/pressure",  # of the whole host; anyone may open a trigger, kernel memory nobody pays for
    "proc/sched_debug",  # every process of the host
    "proc/scsi",  # writable: removes disks
    "proc/timer_list",  # every timer of the host, with the process that set it
    "proc/timer_stats",
    "sys/dev/block",  # the host's disks
    "sys/devices/virtual/block",  # loop devices: where on the host the files of images lie
    "sys/devices/virtual/powercap",  # energy counters: a side channel (CVE-2020-8694)
    "sys/firmware",  # DMI serials, EFI variables
    "sys/fs/selinux",
)

THERMAL_THROTTLE: Final = "sys/devices/system/cpu/cpu{}/thermal_throttle"
"""One for each CPU; a count of heat events tells co-tenants of each other."""

READONLY: Final = (
    "proc/bus",
    "proc/fs",
    "proc/irq",  # interrupt affinity of the host
    "proc/sys",  # sysctls; /sys is mounted read-only as a whole
    "proc/sysrq-trigger",  # reboots and crashes the host
)

SYSV_QUEUES: Final = 1024

SYSCTLS: Final = (
    ("?user/max_fanotify_groups", "0"),
    ("?user/max_fanotify_marks", "0"),
    # No namespaces within: seccomp refuses them, and this holds without it.
    ("user/max_user_namespaces", "0"),
    ("user/max_mnt_namespaces", "0"),
    ("user/max_pid_namespaces", "0"),
    ("user/max_net_namespaces", "0"),
    ("user/max_ipc_namespaces", "0"),
    ("user/max_uts_namespaces", "0"),
    ("user/max_cgroup_namespaces", "0"),
    ("?user/max_time_namespaces", "0"),
    # POSIX message queues: kernel memory (mq_overview(7)).
    ("?fs/mqueue/msg_max", "64"),
    ("?fs/mqueue/msgsize_max", "16384"),
    # System V message queues and semaphores (sysvipc(7)): like its shared memory (shm_sysctls) they
    # outlive the processes, so what they hold is what no kill of a process can give back.
    ("?kernel/msgmni", str(SYSV_QUEUES)),
    ("?kernel/sem", "500 65536 500 1024"),
    # As Docker: a program that is not root may listen on a low port …
    ("?net/ipv4/ip_unprivileged_port_start", "0"),
)

NO_NAMESPACES: Final = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")
"""Of which SYSCTLS allow none."""

HOSTNAME: Final = "sandbox"
"""Until a sandbox is given its own."""

SHM_MB: Final = Limits().shm_mb
"""Of slots made ahead; a sandbox that wants another size is made for it."""


def cap_sysctls(caps: KernelCaps) -> tuple[tuple[str, str], ...]:
    """What is counted per user and up through every parent namespace: a cap in the sandbox's own
    one keeps it from using up the node's (user_namespaces(7), namespaces(7))."""
    return (
        ("?user/max_inotify_instances", str(caps.inotify_instances)),
        ("?user/max_inotify_watches", str(caps.inotify_watches)),
        ("?fs/mqueue/queues_max", str(caps.posix_queues)),
    )


def caps_in_effect(caps: KernelCaps) -> dict[str, int]:
    """Each cap of a sandbox by name, what no setting changes included."""
    return {
        **asdict(caps),
        **{f"{kind}_namespaces": 0 for kind in NO_NAMESPACES},
        "fanotify_groups": 0,
        "keys": 0,  # refused by the filter
        "sysv_queues": SYSV_QUEUES,
    }


def ping_sysctls(last_id: int) -> tuple[tuple[str, str], ...]:
    """… and send a ping: every group up to the last one that a sandbox has."""
    return (("?net/ipv4/ping_group_range", f"0 {last_id}"),)


def shm_sysctls(shm_mb: int) -> tuple[tuple[str, str], ...]:
    """Hold System V shared memory to the size of /dev/shm: it is not in any file system."""
    size_bytes = shm_mb * 1024 * 1024
    return (
        ("?kernel/shmall", str(size_bytes // os.sysconf("SC_PAGE_SIZE"))),
        ("?kernel/shmmax", str(size_bytes)),
    )


VIEWS: Final = (
    ("meminfo", "proc/meminfo"),
    ("cpuinfo", "proc/cpuinfo"),
    ("stat", "proc/stat"),
    ("loadavg", "proc/loadavg"),
    ("uptime", "proc/uptime"),
    ("swaps", "proc/swaps"),
    ("diskstats", "proc/diskstats"),
    # The whole directory: psutil, and so pytest-xdist, counts cores by cpuN/topology in it.
    ("cpu", "sys/devices/system/cpu"),
    ("cgroups", "proc/cgroups"),
    ("cgroup", "sys/fs/cgroup"),
)
"""The view server's names (``sandboxd/views``), and what each goes over."""

DEV_INODES: Final = 256
SHM_INODES: Final = 65_536


def masked_paths(cpu_count: int) -> tuple[str, ...]:
    """All paths to mask on a host with CPUs 0 to ``cpu_count`` - 1."""
    return (*MASKED, *(THERMAL_THROTTLE.format(cpu) for cpu in range(cpu_count)))
