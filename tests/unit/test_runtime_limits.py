"""What a node says of limits that it does not allow or cannot hold, and how it writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxd.config import load_config
from sandboxd.cpu_list import cpu_list, parse_cpu_list
from sandboxd.errors import ConfigError, CpusetUnavailable, LimitUnenforceable, RequestError
from sandboxd.launcher.cgroups import NodeCgroups, SandboxCgroups
from sandboxd.linux.cgroup_limits import LimitsV1, LimitsV2
from sandboxd.model import Limits
from sandboxd.runtime.limits import check_enforceable, check_maximum

MOST = load_config(None, env={}).max_limits
IO = ("io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("1,3,5-7", (1, 3, 5, 6, 7)), ("8191", (8191,))],
)
def test_a_cpu_list_is_read_and_written_as_the_kernel_does(
    text: str, cpus: tuple[int, ...]
) -> None:
    assert parse_cpu_list(text) == cpus
    assert cpu_list(cpus) == text


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0,", ",0", "0-", "-1", "8192", "0 1", "٣", "0x1"]
)
def test_what_is_no_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must look|ends before|above"):
        parse_cpu_list(text)


def refused(limits: Limits, most: Limits) -> dict[str, Any]:
    with pytest.raises(RequestError) as told:
        check_maximum(limits, most)
    return told.value.detail


def test_each_maximum_is_told_by_name() -> None:
    check_maximum(Limits(), MOST)
    assert refused(replace(Limits(), cpu_weight=10_001), MOST)["field"] == "limits.cpu_weight"
    bound = replace(MOST, io_read_bps=1 << 20, cpuset="1-3")
    wanted = replace(Limits(), io_read_bps=1 << 20, cpuset="2")
    check_maximum(wanted, bound)
    assert refused(replace(wanted, io_read_bps=1 << 21), bound)["field"] == "limits.io_read_bps"
    # No bound is more than any.
    assert refused(replace(wanted, io_read_bps=0), bound)["field"] == "limits.io_read_bps"
    assert refused(replace(wanted, cpuset="0-1"), bound) == {
        "field": "limits.cpuset",
        "cpus": "1-3",
    }


def test_cpus_that_the_node_lacks_are_named() -> None:
    check_enforceable(Limits(cpuset="0-1"), {"cpuset": "enforced"}, (0, 1))
    check_enforceable(Limits(cpuset="0-9"), {}, ())  # nothing is known yet
    with pytest.raises(CpusetUnavailable, match=r"has CPUs 2,4, .* may have 0-1"):
        check_enforceable(Limits(cpuset="0,2,4"), {"cpuset": "enforced"}, (0, 1))


@pytest.mark.parametrize("name", [*IO, "cpuset", "cpu_weight"])
def test_what_nothing_holds_is_refused_by_name(name: str) -> None:
    value: Any = "0" if name == "cpuset" else 1 << 20
    limits = replace(Limits(), **{name: value})
    check_enforceable(limits, {name: "enforced"}, (0,))
    with pytest.raises(LimitUnenforceable, match=rf"limits\.{name}") as told:
        check_enforceable(limits, {name: "none"}, (0,))
    assert (told.value.cause, told.value.retryable) == ("request", False)
    # At its default it asks for nothing.
    check_enforceable(Limits(), {name: "none"}, (0,))


def test_who_asks_for_nothing_has_the_operators_bound(tmp_path: Path) -> None:
    file = tmp_path / "sandboxd.toml"
    file.write_text('[max_limits]\ncpuset = "1-2"\nio_read_bps = 2000000\n')
    config = load_config(file, env={})
    assert (config.default_limits.cpuset, config.default_limits.io_read_bps) == ("1-2", 2_000_000)
    assert config.default_limits.io_write_bps == 0


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[default_limits]\ncpuset = "0-"', "default_limits.cpuset"),
        ('[max_limits]\ncpuset = "3-1"', "max_limits.cpuset"),
        ("[max_limits]\ncpuset = 3", "max_limits.cpuset"),
        ('[max_limits]\ncpuset = "1"\n[default_limits]\ncpuset = "0"', "default_limits.cpuset"),
        ("[max_limits]\ncpu_weight = 10001", "max_limits.cpu_weight"),
        ("[default_limits]\ncpu_weight = 0", "default_limits.cpu_weight"),
        ("[kernel_caps]\nptys = 2000000", "kernel_caps.ptys"),
        ("[kernel_caps]\npending_signals = -1", "kernel_caps.pending_signals"),
        ("[default_limits]\nio_read_bps = 5", "default_limits.io_read_bps"),
        ("[max_limits]\nio_write_iops = -1", "max_limits.io_write_iops"),
        (
            "[max_limits]\nio_read_iops = 100\n[default_limits]\nio_read_iops = 200",
            "default_limits.io_read_iops",
        ),
    ],
)
def test_an_impossible_setting_names_its_key(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "sandboxd.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as told:
        load_config(file, env={})
    assert told.value.detail["key"] == key


# --- what is written -------------------------------------------------------------------------


def directory(path: Path, names: tuple[str, ...]) -> Path:
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


@pytest.mark.parametrize(("weight", "shares"), [(1, 10), (39, 399), (100, 1024), (10_000, 102_400)])
def test_a_weight_is_put_on_v1s_scale_as_the_kernel_does_it(
    tmp_path: Path, weight: int, shares: int
) -> None:
    """sched_weight_from_cgroup() of kernel/sched/sched.h: weight * 1024 / 100, rounded."""
    path = directory(tmp_path / "v1", ("cpu.shares",))
    LimitsV1().set_cpu_weight(path, weight)
    assert (path / "cpu.shares").read_text() == str(shares)
    path = directory(tmp_path / "v2", ("cpu.weight",))
    LimitsV2().set_cpu_weight(path, weight)
    assert (path / "cpu.weight").read_text() == str(weight)


def test_io_limits_as_each_version_takes_them(tmp_path: Path) -> None:
    """Documentation/admin-guide/cgroup-v1/blkio-controller.rst, cgroup-v2.rst: io.max."""
    names = tuple(
        f"blkio.throttle.{way}_{what}_device"
        for way in ("read", "write")
        for what in ("bps", "iops")
    )
    path = directory(tmp_path / "v1", names)
    LimitsV1().set_io(path, 7 << 8 | 3, (1_048_576, 0, 64, 0))
    assert [(path / name).read_text() for name in names] == [
        "7:3 1048576",
        "7:3 64",
        "7:3 0",
        "7:3 0",
    ]
    path = directory(tmp_path / "v2", ("io.max",))
    LimitsV2().set_io(path, 7 << 8 | 3, (1_048_576, 0, 64, 0))
    assert (path / "io.max").read_text() == "7:3 rbps=1048576 wbps=max riops=64 wiops=max"


V2_FILES = ("memory.max", "pids.max", "cpu.max", "cpu.weight", "cpuset.cpus", "io.max")


def test_a_slot_that_was_limited_for_another_has_nothing_of_it(tmp_path: Path) -> None:
    v2 = directory(tmp_path / "v2", V2_FILES)
    node = NodeCgroups(tmp_path, {}, frozenset({"memory", "pids", "cpu", "cpuset", "io"}))
    groups = SandboxCgroups(node, v2, {})
    groups.limit(Limits())
    # The kernel's own are right for who asks for nothing, and cost nothing.
    assert [(v2 / name).read_text() for name in ("cpu.weight", "cpuset.cpus", "io.max")] == [""] * 3
    groups.limit(Limits(cpu_weight=400, cpuset="1", io_write_bps=1 << 20))
    groups.limit_devices([7 << 8, 45])  # 45 is a tmpfs': no device
    assert (v2 / "cpu.weight").read_text() == "400"
    assert (v2 / "cpuset.cpus").read_text() == "1"
    assert (v2 / "io.max").read_text() == "7:0 rbps=max wbps=1048576 riops=max wiops=max"
    groups.lift_io()
    assert (v2 / "io.max").read_text().startswith("7:0 rbps=max wbps=max")
    groups.limit(Limits())
    assert (v2 / "cpu.weight").read_text().startswith("100")
    assert (v2 / "cpuset.cpus").read_text().startswith("\n")
