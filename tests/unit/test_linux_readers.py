"""Parsers of what the kernel and files say, on texts as real machines have them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sandboxd.linux import (
    _libc,
    capabilities,
    cgroup,
    cgroup_limits,
    id_ranges,
    mount,
    procfs,
    programs,
    settings,
)

# From a Debian 12 host with systemd, unified.
UNIFIED = """\
23 29 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
"""
# From a host booted with systemd.unified_cgroup_hierarchy=0 ("hybrid").
HYBRID = """\
30 23 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate
32 30 0:28 / /sys/fs/cgroup/systemd rw,nosuid shared:11 - cgroup cgroup rw,xattr,name=systemd
33 30 0:32 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:15 - cgroup cgroup rw,cpu,cpuacct
34 30 0:33 / /sys/fs/cgroup/memory rw,nosuid shared:16 - cgroup cgroup rw,memory
35 30 0:34 / /sys/fs/cgroup/pids rw,nosuid shared:17 - cgroup cgroup rw,pids
"""
HYBRID_MEMBERSHIP = """\
4:memory:/system.slice/a.service
3:pids:/system.slice/a.service
2:cpu,cpuacct:/
1:name=systemd:/system.slice/a.service
0::/system.slice/a.service
"""


def test_mountinfo_of_the_manual():
    """The example of proc_pid_mountinfo(5)."""
    line = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
    (found,) = mount.parse_mountinfo(line)
    assert (found.mount_id, found.parent_id, found.device) == (36, 35, "98:0")
    assert (found.root, found.mountpoint) == ("/mnt1", "/mnt2")
    assert found.options == {"rw", "noatime"}
    assert found.propagation == ("master:1",)
    assert (found.fstype, found.source) == ("ext3", "/dev/root")
    assert found.super_options == {"rw", "errors=continue"}


def test_mountinfo_with_several_propagation_fields_none_and_an_empty_source():
    text = (
        "1 0 0:1 / /a rw shared:2 master:1 propagate_from:3 - tmpfs tmpfs rw\n"
        "2 0 0:2 / /b rw - tmpfs  rw\n"
    )
    first, second = mount.parse_mountinfo(text)
    assert first.propagation == ("shared:2", "master:1", "propagate_from:3")
    assert second.propagation == ()
    assert second.source == ""


def test_mountinfo_unescapes_octal():
    text = "1 0 0:1 /\\011 /with\\040space\\134back\\012line rw - tmpfs a\\040b rw,x=\\040\n"
    (found,) = mount.parse_mountinfo(text)
    assert found.root == "/\t"
    assert found.mountpoint == "/with space\\back\nline"
    assert found.source == "a b"
    assert "x= " in found.super_options


def test_cgroup_layout_unified():
    layout = cgroup.parse_layout(UNIFIED, "0::/user.slice/session-1.scope\n")
    assert layout.v2_mount == Path("/sys/fs/cgroup")
    assert layout.v1 == {}
    assert layout.own == {"": Path("/sys/fs/cgroup/user.slice/session-1.scope")}


def test_cgroup_layout_with_comounted_controllers():
    layout = cgroup.parse_layout(HYBRID, HYBRID_MEMBERSHIP)
    assert layout.v2_mount == Path("/sys/fs/cgroup/unified")
    assert layout.v1 == {
        "cpu": Path("/sys/fs/cgroup/cpu,cpuacct"),
        "cpuacct": Path("/sys/fs/cgroup/cpu,cpuacct"),
        "memory": Path("/sys/fs/cgroup/memory"),
        "pids": Path("/sys/fs/cgroup/pids"),
    }
    assert layout.own["memory"] == Path("/sys/fs/cgroup/memory/system.slice/a.service")
    assert layout.own["cpuacct"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert layout.version_of("memory") == 1
    assert layout.version_of("io") is None
    assert layout.mount_of("io") is None
    limits = cgroup_limits.limits_for(layout, "memory")
    assert isinstance(limits, cgroup_limits.LimitsV1)


def test_cgroup_layout_in_a_container_shows_part_of_the_hierarchy():
    text = "5 4 0:26 /docker/ab /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"
    inside = cgroup.parse_layout(text, "0::/docker/ab/inner\n")
    assert inside.own == {"": Path("/sys/fs/cgroup/inner")}
    outside = cgroup.parse_layout(text, "0::/elsewhere\n")
    assert outside.own == {}


def test_a_controller_of_v2_is_written_as_v2():
    layout = cgroup.CgroupLayout(Path("/c"), frozenset({"memory"}))
    assert isinstance(cgroup_limits.limits_for(layout, "memory"), cgroup_limits.LimitsV2)
    assert layout.mount_of("memory") == Path("/c")
    assert cgroup_limits.limits_for(layout, "pids") is None


def control_files(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).touch()
    return directory


def test_limits_v2_writes(tmp_path):
    path = control_files(tmp_path, "memory.max", "memory.swap.max", "pids.max", "cpu.max")
    limits = cgroup_limits.LimitsV2()
    limits.set_memory(path, 64 << 20)
    limits.set_pids(path, 512)
    limits.set_cpu(path, 1.5)
    assert (path / "memory.max").read_text() == "67108864"
    assert (path / "memory.swap.max").read_text() == "0"
    assert (path / "pids.max").read_text() == "512"
    assert (path / "cpu.max").read_text() == "150000 100000"


def test_limits_v2_without_swap_in_the_kernel(tmp_path):
    cgroup_limits.LimitsV2().set_memory(control_files(tmp_path, "memory.max"), 1 << 20)
    assert (tmp_path / "memory.max").read_text() == "1048576"


def test_limits_v1_writes(tmp_path):
    path = control_files(
        tmp_path,
        *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        *("cpu.cfs_period_us", "cpu.cfs_quota_us"),
    )
    limits = cgroup_limits.LimitsV1()
    limits.set_memory(path, 64 << 20, 1 << 20)
    limits.set_cpu(path, 0.001)
    assert (path / "memory.limit_in_bytes").read_text() == "67108864"
    assert (path / "memory.memsw.limit_in_bytes").read_text() == str(65 << 20)
    assert (path / "cpu.cfs_period_us").read_text() == "100000"
    assert (path / "cpu.cfs_quota_us").read_text() == "1000", "the least the kernel takes"


def test_limits_v1_without_swap_accounting(tmp_path):
    path = control_files(tmp_path, "memory.limit_in_bytes", "memory.swappiness")
    cgroup_limits.LimitsV1().set_memory(path, 1 << 20)
    assert (path / "memory.swappiness").read_text() == "0"
    assert not (path / "memory.memsw.limit_in_bytes").exists()


def test_a_missing_control_file_is_an_error_and_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        cgroup_limits.LimitsV2().set_pids(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_usage_v2(tmp_path):
    files = {
        "memory.current": "4096\n",
        "memory.peak": "8192\n",
        "memory.events": "low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n",
        "cpu.stat": "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n",
        "pids.current": "3\n",
        "pids.events": "max 7\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    limits = cgroup_limits.LimitsV2()
    assert limits.memory_bytes(tmp_path) == 4096
    assert limits.memory_peak_bytes(tmp_path) == 8192
    assert limits.oom_kills(tmp_path) == 1
    assert limits.cpu_usec(tmp_path) == 1500
    assert limits.pids(tmp_path) == 3
    assert limits.pids_refused(tmp_path) == 7


def test_usage_v1(tmp_path):
    files = {
        "memory.usage_in_bytes": "4096\n",
        "memory.max_usage_in_bytes": "8192\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
        "cpuacct.usage": "1500999\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    limits = cgroup_limits.LimitsV1()
    assert limits.memory_bytes(tmp_path) == 4096
    assert limits.memory_peak_bytes(tmp_path) == 8192
    assert limits.oom_kills(tmp_path) == 5
    assert limits.cpu_usec(tmp_path) == 1500


def test_subtree_is_children_first_and_removal_of_nothing_is_no_error(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "file").touch()
    found = list(cgroup.subtree(tmp_path))
    assert found[-1] == tmp_path
    assert found.index(tmp_path / "a/b") < found.index(tmp_path / "a")
    assert len(found) == 4
    cgroup.remove_tree(tmp_path / "a", time.monotonic())
    assert not (tmp_path / "a").exists()
    cgroup.remove_tree(tmp_path / "a", time.monotonic())


def test_own_process_in_procfs():
    ids = procfs.ids_of()
    assert ids.uids[:3] == os.getresuid()
    assert ids.gids[:3] == os.getresgid()
    assert set(ids.groups) == set(os.getgroups())
    stat = procfs.stat()
    assert (stat.pid, stat.parent_pid, stat.state) == (os.getpid(), os.getppid(), "R")
    assert os.getpid() in procfs.pids()
    assert procfs.status()["Pid"] == str(os.getpid())


def test_resource_limits_are_those_of_the_process():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = tuple(None if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    assert procfs.resource_limits()["Max open files"] == expected


def test_a_missing_sysctl_is_none():
    assert procfs.sysctl("kernel.no_such_thing") is None
    assert procfs.sysctl("kernel.ostype") == "Linux"


def test_capability_masks_and_names():
    assert capabilities.mask([0, 40]) == 1 << 40 | 1
    assert capabilities.names(1 << 40 | 1 << 41 | 1) == [
        "CAP_CHOWN",
        "CAP_CHECKPOINT_RESTORE",
        "CAP_41",
    ]
    status = procfs.capabilities_of()
    own = capabilities.capget()
    assert (own.effective, own.permitted) == (status["CapEff"], status["CapPrm"])
    assert capabilities.bounding() == status["CapBnd"]


def test_subordinate_ids(tmp_path):
    file = tmp_path / "subuid"
    file.write_text(
        "other:100000:65536\n# comment\n\nme:165536:10\nme:200000:70000\nme:x:1\nroot:1:2:3\n"
    )
    wanted = id_ranges.IdRange(200000, 70000)
    assert id_ranges.largest(file, "me") == wanted
    assert len(id_ranges.ranges(file, "me")) == 2
    assert id_ranges.largest(file, "nobody-here") is None
    assert id_ranges.ranges(tmp_path / "missing", "me") == []


def test_subordinate_ids_by_uid(tmp_path):
    file = tmp_path / "subuid"
    file.write_text("0:5000:10\n")
    assert id_ranges.ranges(file, "root") == [id_ranges.IdRange(5000, 10)]


def test_programs_are_found_in_path_first(tmp_path, monkeypatch):
    program = tmp_path / "nft"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs.find_program("nft") == program
    assert programs.find_program("no-such-program") is None
    assert programs.find_program("sh") is not None, "system directories count besides PATH"
    assert programs.remedy("nft") == "apt-get install nftables"


def test_settings_grow_with_the_sandboxes():
    few = {need.name: need for need in settings.needs(1)}
    many = {need.name: need for need in settings.needs(100_000_000)}
    assert few.keys() == many.keys()
    assert all(many[name].needed > few[name].needed for name in few)
    missed = [need for need in many.values() if not need.met]
    assert missed
    assert all(need.remedy and need.why for need in missed)


def test_names_with_a_nul_are_refused():
    with pytest.raises(OSError, match="NUL") as caught:
        _libc.encoded("/etc\0/x")
    assert caught.value.errno == 22
