"""What the views say, from figures and limits; formats against proc(5) and the kernel's own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.launcher.cpus import Cpus
from sandboxd.rootfs import skeleton
from sandboxd.views import cgroup_files, content, figures, tree
from sandboxd.views.content import Clock
from sandboxd.views.figures import Cpu, Memory
from sandboxd.views.pace import BURST, RATE, WAIT_MAX_S, Pace
from sandboxd.views.scope import Scope
from sandboxd.views.tree import Node

SCOPE = Scope((1, 5), memory_kb=2048 * 1024, disk_kb=1024 * 1024, started_s=1000.0, started_at=1e9)
GIB_KB = 1024 * 1024


def numbers(text: bytes) -> dict[str, int]:
    """As free(1) and psutil read it."""
    return {
        name: int(value)
        for name, value in re.findall(r"^([^:]+):\s+(\d+) kB$", text.decode(), re.MULTILINE)
    }


# --- memory ----------------------------------------------------------------------------------


def test_memory_of_an_idle_sandbox_is_its_limit_and_all_free() -> None:
    found = numbers(content.meminfo(SCOPE, Memory()))
    assert found["MemTotal"] == found["MemFree"] == found["MemAvailable"] == 2048 * 1024
    assert found["SwapTotal"] == found["SwapFree"] == 0


def test_what_is_on_the_disk_is_no_memory() -> None:
    """Pages of the writable layer are in the same cgroup, and in no figure."""
    used = Memory(usage=700 * 1024, shmem=600 * 1024, anon=100 * 1024, inactive_anon=700 * 1024)
    found = numbers(content.meminfo(SCOPE, used))
    assert found["MemFree"] == 1948 * 1024
    assert found["Shmem"] == found["Cached"] == 0
    assert found["Inactive(anon)"] == 100 * 1024


def test_shared_memory_is_what_no_disk_could_hold() -> None:
    found = numbers(content.meminfo(SCOPE, Memory(usage=GIB_KB + 64, shmem=GIB_KB + 64)))
    assert found["Shmem"] == found["Cached"] == 64
    assert found["MemFree"] == found["MemTotal"] - 64


def test_page_cache_is_available() -> None:
    used = Memory(usage=300, file=200, active_file=50, inactive_file=150, anon=100)
    found = numbers(content.meminfo(SCOPE, used))
    assert found["MemAvailable"] - found["MemFree"] == 200
    assert found["Cached"] == 200


KB = st.integers(0, 4 * GIB_KB)


@given(KB, KB, KB, KB)
def test_memory_figures_fit_each_other(usage: int, anon: int, file: int, shmem: int) -> None:
    """free(1) subtracts them from each other: none may be above the total, or below 0."""
    used = Memory(usage=usage, anon=anon, file=file, shmem=shmem, inactive_file=file)
    found = numbers(content.meminfo(SCOPE, used))
    assert min(found.values()) >= 0
    assert found["MemFree"] + found["Cached"] <= found["MemTotal"]
    assert found["MemFree"] <= found["MemAvailable"] <= found["MemTotal"]


def test_every_line_is_one_the_kernel_has() -> None:
    ours = numbers(content.meminfo(SCOPE, Memory()))
    kernels = numbers(Path("/proc/meminfo").read_bytes())
    assert ours.keys() <= kernels.keys()


# --- time, load and processors -----------------------------------------------------------------


def fields(text: bytes) -> dict[str, list[int]]:
    lines = (line.split() for line in text.decode().splitlines())
    return {name: [int(value) for value in values] for name, *values in lines}


def test_stat_adds_up_and_has_the_sandboxs_cpus() -> None:
    text = content.stat(SCOPE, Clock(), Cpu(user=3_010_000, system=1_000_000), 7, now_s=1010.0)
    found = fields(text)
    assert {name for name in found if name.startswith("cpu")} == {"cpu", "cpu1", "cpu5"}
    assert [a + b for a, b in zip(found["cpu1"], found["cpu5"], strict=True)] == found["cpu"]
    # 10 s on 2 CPUs at 100 ticks a second, all of it accounted for.
    assert sum(found["cpu"]) == 2000
    assert found["cpu"][0] == 301
    assert found["btime"] == [10**9]
    assert found["processes"] == [7]


def test_stat_has_the_fields_of_the_kernels() -> None:
    ours = fields(content.stat(SCOPE, Clock(), Cpu(), 0, now_s=1001.0))
    kernels = fields(Path("/proc/stat").read_bytes())
    assert len(ours["cpu1"]) == len(kernels["cpu0"])
    assert ours.keys() - {"cpu1", "cpu5"} <= kernels.keys()


@given(st.lists(st.tuples(st.floats(0.001, 100), st.integers(0, 10**9)), max_size=20))
def test_idle_time_never_falls(steps: list[tuple[float, int]]) -> None:
    """Also where run time is told in bursts: what top computes from it would be negative."""
    clock, now_s, used, last = Clock(), SCOPE.started_s, 0, 0
    for elapsed_s, usec in steps:
        now_s, used = now_s + elapsed_s, used + usec
        idle = clock.idle_ticks(SCOPE, Cpu(used, 0), now_s)
        assert idle >= last
        last = idle


def test_load_tends_to_the_cpus_at_work() -> None:
    clock = Clock()
    for second in range(1, 3601):
        used = Cpu(user=1_500_000 * second)
        content.loadavg(SCOPE, clock, used, 3, SCOPE.started_s + second)
    assert content.loadavg(SCOPE, clock, used, 3, SCOPE.started_s + 3600).startswith(
        b"1.50 1.50 1.4"
    )
    # A minute of rest: by 1/e, as the kernel's falls.
    one, *_ = content.loadavg(SCOPE, clock, used, 3, SCOPE.started_s + 3660).split()
    assert float(one) == pytest.approx(1.5 / 2.71828, abs=0.01)


def test_loadavg_and_uptime_have_the_kernels_form() -> None:
    load = content.loadavg(SCOPE, Clock(), Cpu(), 3, 1001.0).decode()
    assert re.fullmatch(r"\d+\.\d\d \d+\.\d\d \d+\.\d\d \d+/\d+ \d+\n", load)
    up = content.uptime(SCOPE, Clock(), Cpu(user=500_000), 1012.5)
    assert up == b"12.50 24.50\n"


HOST_CPUS = b"".join(
    b"processor\t: %d\nmodel name\t: A\nphysical id\t: %d\nsiblings\t: 4\ncore id\t\t: 9\n"
    b"cpu cores\t: 4\nflags\t\t: fpu\n\n" % (cpu, cpu // 4)
    for cpu in range(8)
)


def test_cpuinfo_is_the_hosts_of_these_cpus_as_one_package() -> None:
    text = content.cpuinfo(SCOPE, HOST_CPUS).decode()
    assert re.findall(r"^processor\s*: (\d+)$", text, re.MULTILINE) == ["1", "5"]
    assert re.findall(r"^physical id\s*: (\d+)$", text, re.MULTILINE) == ["0", "0"]
    assert re.findall(r"^core id\s*: (\d+)$", text, re.MULTILINE) == ["1", "5"]
    assert re.findall(r"^siblings\s*: (\d+)$", text, re.MULTILINE) == ["2", "2"]
    assert text.count("model name\t: A\n") == 2


def test_cpuinfo_of_all_cpus_has_the_blocks_of_the_kernels() -> None:
    host = Path("/proc/cpuinfo").read_bytes()
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    ours = content.cpuinfo(Scope(cpus, 0, 0, 0, 0), host)
    assert ours.count(b"processor\t") == len(cpus)
    assert ours.splitlines()[0] == host.splitlines()[0]


# Documentation/admin-guide/cputopology.rst: lists and masks as the kernel prints them.
@pytest.mark.parametrize(
    ("cpus", "as_list", "as_mask"),
    [
        ((0,), "0", "1"),
        ((0, 1), "0-1", "3"),
        ((1, 5), "1,5", "22"),
        ((0, 1, 2, 8, 33), "0-2,8,33", "2,00000107"),
        ((64,), "64", "1,00000000,00000000"),
    ],
)
def test_lists_and_masks_are_written_as_by_the_kernel(
    cpus: tuple[int, ...], as_list: str, as_mask: str
) -> None:
    assert content.cpu_list(cpus) == as_list
    assert content.cpu_mask(cpus) == as_mask


def test_each_cpu_is_a_core_of_its_own() -> None:
    """psutil counts the different core_cpus_list for physical cores."""
    lists = {content.cpu_file(Node(0, "core_cpus_list", False, cpu), (1, 5)) for cpu in (1, 5)}
    assert lists == {b"1\n", b"5\n"}
    assert content.cpu_file(Node(0, "package_cpus_list", False, 1), (1, 5)) == b"1,5\n"
    assert content.cpu_file(Node(0, "possible", False), (1, 5)) == b"1,5\n"


# --- names and inode numbers -------------------------------------------------------------------


def walk(node: Node, cpus: tuple[int, ...], path: str) -> Iterator[tuple[str, Node]]:
    yield path, node
    for child in tree.children(node, cpus):
        yield from walk(child, cpus, f"{path}/{child.name}")


@pytest.mark.parametrize("cpus", [(0,), (1, 5), tuple(range(64)), (8191,)])
def test_each_node_has_an_inode_of_its_own_and_is_found_by_it(cpus: tuple[int, ...]) -> None:
    top = tree.node_at(3 << tree.SHIFT, cpus)
    assert top is not None
    found = dict(walk(top, cpus, ""))
    inodes = {tree.inode(3, node): node for node in found.values()}
    assert len(inodes) == len(found)
    for number, node in inodes.items():
        assert tree.index_of(number) == 3
        assert tree.node_at(number, cpus) == node
    assert f"/cpu/cpu{cpus[-1]}/topology/core_cpus_list" in found


def test_other_cpus_have_no_nodes() -> None:
    node = dict(walk(Node(0, "", True), (1, 5), ""))["/cpu/cpu5/topology/core_id"]
    assert tree.node_at(tree.inode(3, node), (1, 5)) == node
    assert tree.node_at(tree.inode(3, node), (1,)) is None
    assert tree.child(Node(0, "", True), "..", (1,)) is None


def test_the_launcher_binds_what_the_server_has() -> None:
    names = [child.name for child in tree.children(Node(0, "", True), (0,))]
    assert names == [name for name, _ in skeleton.VIEWS]
    for _, path in skeleton.VIEWS:
        assert Path("/", path).exists()


def test_a_commands_cgroup_has_the_files_of_the_root() -> None:
    """JVM, Go and Node look below the path of /proc/self/cgroup first."""
    top = tree.child(Node(0, "", True), "cgroup", (0,))
    assert top is not None
    names = {node.name for node in tree.children(top, (0,)) if not node.directory}
    inodes = set()
    for name in ("e0", "e7", "e4294967295"):
        command = tree.child(top, name, (0,))
        assert command is not None
        assert {node.name for node in tree.children(command, (0,))} == names
        for node in (command, *tree.children(command, (0,))):
            assert tree.node_at(tree.inode(3, node), (0,)) == node
            inodes.add(tree.inode(3, node))
    assert len(inodes) == 3 * (len(names) + 1)
    assert not inodes & {tree.inode(3, node) for node in tree.children(top, (0,))}
    for name in ("e", "e01", "e-1", "x1", "e1/", "e٣", "e99999999999"):
        assert tree.child(top, name, (0,)) is None


def test_every_cgroup_file_has_a_text() -> None:
    scope = Scope((1, 5), 2048, 1024, 0, 0, quota_us=150_000, cpu_weight=400, pids=64)
    memory = Memory(usage=1500, anon=100, shmem=1100, file=200)
    v1 = [name for names in cgroup_files.V1_FILES.values() for name in names]
    texts = {
        name: cgroup_files.text(name, scope, memory, Cpu(5, 7), 3).decode()
        for name in (*cgroup_files.FILES, *v1)
    }
    assert texts["memory.max"] == texts["memory.limit_in_bytes"] == f"{2 << 20}\n"
    # 1024 KiB of the tmpfs pages are its disk.
    assert texts["memory.current"] == texts["memory.usage_in_bytes"] == f"{476 << 10}\n"
    assert texts["cpu.max"] == "150000 100000\n"
    assert (texts["cpu.cfs_quota_us"], texts["cpu.cfs_period_us"]) == ("150000\n", "100000\n")
    assert (texts["cpu.weight"], texts["cpu.shares"]) == ("400\n", "4096\n")
    assert texts["cpuset.cpus.effective"] == texts["cpuset.effective_cpus"] == "1,5\n"
    assert (texts["pids.max"], texts["pids.current"]) == ("64\n", "3\n")
    assert texts["cpu.stat"] == "usage_usec 12\nuser_usec 5\nsystem_usec 7\n"
    assert "anon 102400\nfile 282624\n" in texts["memory.stat"]
    assert texts["memory.soft_limit_in_bytes"] == "9223372036854771712\n"


# --- figures -----------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[int]]:
    fds: list[int] = []
    yield fds
    for fd in fds:
        os.close(fd)


def open_text(tmp_path: Path, opened: list[int], name: str, text: str) -> int:
    (tmp_path / name).write_text(text)
    opened.append(os.open(tmp_path / name, os.O_RDONLY))
    return opened[-1]


# Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst: v1's "cache" and v2's "file"
# hold shmem as well.
@pytest.mark.parametrize(
    "stat",
    [
        "cache 8192\nrss 4096\nshmem 2048\nmapped_file 1024\ninactive_file 5120\ntotal_rss 9\n",
        "anon 4096\nfile 8192\nshmem 2048\nfile_mapped 1024\ninactive_file 5120\n",
    ],
)
def test_memory_of_both_versions(tmp_path: Path, opened: list[int], stat: str) -> None:
    usage = open_text(tmp_path, opened, "usage", "16384\n")
    found = figures.memory(usage, open_text(tmp_path, opened, "stat", stat))
    assert (found.usage, found.anon, found.file, found.shmem) == (16, 4, 6, 2)
    assert (found.mapped, found.inactive_file) == (1, 5)


def test_what_cannot_be_read_is_zero(tmp_path: Path, opened: list[int]) -> None:
    assert figures.memory(None, None) == Memory()
    assert figures.cpu(None) == Cpu()
    assert figures.processes(None) == 0
    assert figures.processes(open_text(tmp_path, opened, "max", "max\n")) == 0


# --- pace --------------------------------------------------------------------------------------


def test_a_burst_is_free_and_then_each_request_waits_its_turn() -> None:
    pace = Pace()
    delays = [pace.delay_s(100.0) for _ in range(int(BURST) + 10)]
    assert delays[: int(BURST) - 1] == [0.0] * (int(BURST) - 1)
    assert delays[-1] == pytest.approx(10 / RATE)
    # Nobody waits longer than the bound, however many ask.
    assert max(pace.delay_s(100.0) for _ in range(10_000)) == WAIT_MAX_S


def test_a_rest_gives_the_allowance_back() -> None:
    pace = Pace()
    for _ in range(int(BURST) + 100):
        pace.delay_s(100.0)
    assert pace.delay_s(100.0 + 2 * BURST / RATE) == 0.0


# --- which CPUs --------------------------------------------------------------------------------


def test_cpus_are_rounded_up_and_spread() -> None:
    cpus = Cpus(range(4))
    assert cpus.take(0.5).cpus == (0,)
    assert cpus.take(1.5).cpus == (1, 2)
    assert cpus.take(1).cpus == (3,)
    # 1 and 2 have three quarters of a CPU each, 0 has half a one.
    assert cpus.take(0.25).cpus == (0,)
    assert cpus.take(64).cpus == (0, 1, 2, 3)


def test_equal_cpus_take_turns() -> None:
    cpus = Cpus(range(3))
    taken = []
    for _ in range(6):
        share = cpus.take(1)
        taken += share.cpus
        cpus.give_back(share)
    assert sorted(taken) == [0, 0, 1, 1, 2, 2]


def test_cpus_within_a_set() -> None:
    cpus = Cpus(range(8))
    assert cpus.take(2, within=(6, 7)).cpus == (6, 7)
    assert cpus.take(4, within=(2, 3)).cpus == (2, 3)


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=40))
def test_nothing_is_left_taken(wanted: list[float]) -> None:
    cpus = Cpus((0, 2, 4))
    shares = [cpus.take(one) for one in wanted]
    assert cpus.taken
    for share in shares:
        cpus.give_back(share)
    assert not cpus.taken
