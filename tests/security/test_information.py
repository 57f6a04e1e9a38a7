"""What a sandbox can learn: of its own all, of the host and its neighbours nothing that names them.

Shared with every process of the host and not hidden, as the kernel has one of each: its version and
build (/proc/version, /proc/config.gz), its command line (/proc/cmdline), the boot id
(/proc/sys/kernel/random/boot_id), clocks, sysinfo(2), the model of the processors and which of
them it runs on, interrupt and paging figures (/proc/softirqs, /proc/vmstat), the hardware below
/sys/devices, the size of the host's devtmpfs in mountinfo, the host ids of the sandbox's range
there, and the names of image mounts (i1, i2 …).
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from tests.framework.daemon import Daemon
from tests.security.probing import Inside

FILES = (
    "/proc/self/mountinfo",
    "/proc/self/mounts",
    "/proc/self/mountstats",
    "/proc/1/mountinfo",
    "/proc/self/cgroup",
    "/proc/1/cgroup",
    "/proc/1/cmdline",
    "/proc/1/comm",
    "/proc/1/status",
    "/proc/1/stat",
    "/proc/1/sched",
    "/proc/1/limits",
    "/proc/self/environ",
    "/proc/self/maps",
    "/proc/self/net/unix",
    "/proc/self/net/netlink",
    "/proc/locks",
    "/proc/sysvipc/shm",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/mtab",
)


def names_of_the_host(daemon: Daemon, sandbox: str) -> set[str]:
    """Paths and names that only the host knows."""
    return {
        str(daemon.runtime_dir),
        str(daemon.state_dir),
        str(daemon.images_dir),
        str(daemon.runtime_dir.parent),
        str(Path(__file__).parents[2]),
        "sandbox_init",
        "sandboxd",
        sandbox,
        socket.gethostname(),
        daemon.token,
    }


@pytest.mark.parametrize("path", FILES)
def test_file_names_nothing_of_the_host(path: str, inside: Inside) -> None:
    text = inside.shell(f"cat {path} 2>/dev/null | tr '\\0' '\\n'")
    for name in names_of_the_host(inside.daemon, inside.sandbox):
        assert name not in text


def test_control_such_names_are_in_the_hosts_own_files(daemon: Daemon, standing: str) -> None:
    text = Path(f"/proc/{daemon.pid}/cmdline").read_text()
    assert any(name in text for name in names_of_the_host(daemon, standing))


def test_hostname_is_the_sandboxs(inside: Inside) -> None:
    assert inside.shell("hostname").strip() == "sandbox"
    assert inside.shell("cat /proc/sys/kernel/hostname").strip() == "sandbox"
    assert inside.shell("cat /proc/sys/kernel/domainname").strip() in ("(none)", "")


def test_overlay_options_are_relative(as_root: Inside) -> None:
    """Names of layers without a path: nothing of where images lie, or of how many sandboxes there
    have been. Linux 6.1 wants layers attached, each below a name drawn for it alone."""
    lines = as_root.shell("grep ' / / ' /proc/self/mountinfo").splitlines()
    options = lines[-1].rpartition(" ")[2].split(",")
    pairs = [one.partition("=") for one in options]
    kinds = ("lowerdir", "lowerdir+", "upperdir", "workdir")
    layers = [value for key, _, value in pairs if key in kinds]
    assert len(layers) >= 3
    known = re.compile(r"i\d+|(w[0-9a-f]{12}/)?[uw]")
    assert not [layer for layer in layers if not known.fullmatch(layer)], options


def test_mounts_are_those_of_the_sandbox_alone(as_root: Inside) -> None:
    points = set(as_root.shell("cut -d' ' -f5 /proc/self/mountinfo").split())
    known = ("/proc", "/sys", "/dev")
    assert not [point for point in points if point != "/" and not point.startswith(known)]


def test_roots_of_mounts_are_no_paths_of_the_host(as_root: Inside) -> None:
    """The fourth field, where in its file system a mount begins."""
    roots = set(as_root.shell("cut -d' ' -f4 /proc/self/mountinfo").split())
    # The views: below a name drawn for this sandbox alone.
    views = {root for root in roots if re.fullmatch(r"/[0-9a-f]{16}/[a-z]+", root)}
    assert len({root.split("/")[1] for root in views}) == 1
    roots -= views
    devices = {"/null", "/zero", "/full", "/random", "/urandom", "/tty"}
    assert roots <= {"/", "/mask/dir", "/mask/file", "/bus", "/fs", "/irq", "/sys"} | devices | {
        "/sysrq-trigger"
    }


def test_command_line_of_pid1_is_plain(inside: Inside) -> None:
    assert inside.shell("cat /proc/1/cmdline") == "init\0zygote\0"


def test_pids_of_the_host_are_not_told(inside: Inside) -> None:
    """NSpid would show the number in every namespace outside; here, only inwards."""
    numbers = inside.shell("grep NSpid /proc/self/status").split()
    assert len(numbers) == 2
    assert inside.shell("grep PPid /proc/1/status").split() == ["PPid:", "0"]


def test_environment_of_pid1_is_closed(inside: Inside) -> None:
    assert inside.ask("read:/proc/1/environ") == "EACCES"


def test_kernel_log_is_closed(inside: Inside) -> None:
    assert inside.ask("open_r:/proc/kmsg") in ("EACCES", "EPERM")
    assert inside.ask("open_r:/dev/kmsg") == "ENOENT"
    assert inside.run(["/bin/dmesg"])["exit_code"] != 0


def test_kernel_addresses_are_hidden(inside: Inside) -> None:
    for line in inside.shell("head -3 /proc/modules; head -3 /proc/iomem").splitlines():
        assert "0xffff" not in line


def test_serial_numbers_are_closed(inside: Inside) -> None:
    for name in ("product_serial", "product_uuid", "board_serial", "chassis_serial"):
        assert inside.ask(f"read:/sys/class/dmi/id/{name}") in ("EACCES", "ENOENT")


def test_processes_of_the_host_are_not_listed_anywhere(inside: Inside) -> None:
    own = str(os.getpid())
    for path in ("/proc/locks", "/proc/timer_list", "/proc/sched_debug", "/proc/keys"):
        assert own not in inside.shell(f"cat {path} 2>/dev/null").split()


def test_another_sandbox_is_not_named(daemon: Daemon, as_root: Inside) -> None:
    with daemon.sandbox("busybox", name="neighbour-2718", hostname="neighbour-2718") as other:
        assert daemon.exec(other, "hostname")["stdout"].strip() == "neighbour-2718"
        script = "cat /proc/[0-9]*/cmdline /proc/self/mountinfo /proc/self/cgroup; env"
        text = as_root.shell(f"{script} 2>/dev/null")
        assert "neighbour-2718" not in text
        assert other not in text


def test_memory_of_an_ended_sandbox_is_not_found_again(
    daemon: Daemon, programs: dict[str, Path]
) -> None:
    """Fresh pages of a new sandbox are zero, as the kernel has it."""
    with daemon.sandbox("busybox") as one:
        daemon.exec(one, "yes secret-1618 | head -c 30000000 >/tmp/secret")
    with daemon.sandbox("busybox") as other:
        script = "dd if=/dev/zero of=/tmp/new bs=1M count=1 seek=40; grep -c secret-1618 /tmp/new"
        assert daemon.exec(other, script)["stdout"].strip() == "0"
    del programs
