"""What a node has room for, the pressure of the machine, and when to come back."""

import asyncio
import os
import resource
from dataclasses import replace

import pytest

from sandboxd.config import load_config
from sandboxd.linux import cgroup, pressure
from sandboxd.linux.pressure import Stall
from sandboxd.model import Limits
from sandboxd.runtime import pressure as node_pressure
from sandboxd.runtime.admission import LONGEST_S, Comeback
from sandboxd.runtime.capacity import Amounts, Ledger, demand, node_capacity
from sandboxd.runtime.pressure import Pressure, Sample

CONFIG = load_config(env={})


class TestReaders:
    def test_psi(self):
        text = (
            "some avg10=0.16 avg60=0.24 avg300=0.35 total=125042561\n"
            "full avg10=12.50 avg60=0.05 avg300=0.22 total=52178980\n"
        )
        assert pressure.parse_stall(text) == Stall(0.16, 12.5)
        assert pressure.parse_stall(text.splitlines()[0]) == Stall(0.16, 0.0)

    def test_a_kernel_without_psi_tells_nothing(self, tmp_path):
        assert pressure.stalls(tmp_path) == {}

    def test_memory(self):
        page = os.sysconf("SC_PAGE_SIZE")
        total, available = pressure.memory_mb()
        assert total == os.sysconf("SC_PHYS_PAGES") * page >> 20
        assert 0 < available <= total

    def v1(self, tmp_path, limit):
        job = tmp_path / "job"
        step = job / "step"
        step.mkdir(parents=True)
        for path, bytes_ in ((job, limit), (step, 9223372036854771712)):
            (path / "memory.limit_in_bytes").write_text(f"{bytes_}\n")
            (path / "memory.usage_in_bytes").write_text(f"{96 << 20}\n")
            (path / "memory.stat").write_text(f"cache 5\ntotal_inactive_file {32 << 20}\n")
        return cgroup.CgroupLayout(None, frozenset(), {"memory": tmp_path}, {"memory": step})

    def test_the_job_s_own_limit_counts(self, tmp_path):
        assert pressure.cgroup_memory_mb(self.v1(tmp_path, 512 << 20)) == (512, 448)

    def test_no_limit(self, tmp_path):
        assert pressure.cgroup_memory_mb(self.v1(tmp_path, 9223372036854771712)) is None

    def test_v2(self, tmp_path):
        own = tmp_path / "slice"
        own.mkdir()
        (own / "memory.max").write_text("max\n")
        (own / "memory.current").write_text(f"{10 << 20}\n")
        (own / "memory.stat").write_text("inactive_file 0\n")
        layout = cgroup.CgroupLayout(tmp_path, frozenset({"memory"}), {}, {"": own})
        assert pressure.cgroup_memory_mb(layout) is None
        (own / "memory.max").write_text(f"{64 << 20}\n")
        assert pressure.cgroup_memory_mb(layout) == (64, 54)


class TestLedger:
    def test_every_resource_can_be_the_one_that_is_short(self):
        small = Limits(cpus=0.5, memory_mb=10, disk_mb=6, pids=3)
        one = demand(small)
        assert (one.cpus, one.memory_mb, one.pids) == (0.5, 18, 4)
        for name in ("sandboxes", "memory_mb", "cpus", "pids", "fds"):
            double = one.plus(one)
            ledger = Ledger(replace(double, **{name: getattr(one, name)}))
            ledger.take("a", "r", one)
            assert ledger.short(one) == name
            assert ledger.give("a") == "r"
            assert ledger.short(one) is None

    def test_taking_and_giving_twice_counts_once(self):
        ledger = Ledger(Amounts(sandboxes=2))
        for _ in range(2):
            ledger.take("a", "r", Amounts(sandboxes=1, cpus=0.1))
            ledger.take("b", "r", Amounts(sandboxes=1, cpus=0.2))
        assert (ledger.used.sandboxes, ledger.of_run("r")) == (2, 2)
        for name in ("a", "a", "b", "b"):
            ledger.give(name)
        assert ledger.used == Amounts()
        assert ledger.of_run("r") == 0

    def test_the_node_by_its_own_figures(self):
        config = load_config(
            env={},
            overrides={
                "memory_reserve_mb": 100,
                "memory_overcommit": 2.0,
                "cpu_overcommit": 3.0,
                "max_connections": 1000,
            },
        )
        found = node_capacity(config, nofile=10_000)
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        assert found.memory_mb <= 2 * (total - 100)
        assert found.cpus == 3 * len(os.sched_getaffinity(0))
        assert found.sandboxes == config.max_sandboxes
        assert found.fds == 10_000 - 1000 - 512
        # Never more than half of the descriptors for connections.
        assert node_capacity(config, nofile=1024).fds == 1024 - 512 - 512
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


class TestPressure:
    def look(self, *samples, **settings):
        """Whether it is closed after each of the samples, and how often it opened again."""
        config = load_config(env={}, overrides={"memory_reserve_mb": 1000, **settings})
        told = iter(samples)
        opened = []

        async def main():
            watch = Pressure(config, lambda: opened.append(1), lambda: next(told))
            closed = [watch.closed_by]
            for _ in samples[1:]:
                watch._timer.cancel()
                watch._look()
                closed.append(watch.closed_by)
            watch.close()
            return closed

        return asyncio.run(main()), len(opened)

    def test_little_memory_closes_and_much_more_opens(self):
        closed, opened = self.look(*(Sample(mb, {}) for mb in (1001, 999, 1001, 1400, 1500, 1001)))
        low = ("memory-low",)
        assert closed == [(), low, low, low, (), ()]
        assert opened == 1

    def test_one_that_presses_against_its_own_limit_closes_nothing(self):
        full = {"memory": Stall(99, 99)}
        closed, _ = self.look(Sample(60_000, full), Sample(4001, full), Sample(3999, full))
        assert closed == [(), (), ("memory-pressure",)]

    def test_a_stall_closes_until_it_is_well_below(self):
        def full(percent):
            return Sample(3999, {"memory": Stall(99, percent), "cpu": Stall(99, 0)})

        settings = {"pressure_memory_percent": 10.0}
        closed, opened = self.look(*map(full, (9, 11, 9, 6.9, 9)), **settings)
        by = ("memory-pressure",)
        assert closed == [(), by, by, (), ()]
        assert opened == 1

    def test_cpu_closes_only_where_that_was_asked_for(self):
        busy = Sample(9999, {"cpu": Stall(100, 0)})
        assert self.look(busy)[0] == [()]
        assert self.look(busy, pressure_cpu_percent=90.0)[0] == [("cpu-pressure",)]

    def test_the_machine_is_read(self):
        found = node_pressure.Sampler()()
        assert found.available_mb > 0


class TestComeback:
    def test_each_has_a_time_of_its_own_at_the_rate_seats_become_free(self):
        comeback = Comeback()
        for n in range(20):  # two a second
            comeback.freed(100 + n / 2)
        times = [comeback.after_s(110, 0, 60) for _ in range(10)]
        assert times == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert comeback.after_s(110, 100, 60) == pytest.approx(51, abs=1)

    def test_never_for_longer_than_that(self):
        comeback = Comeback()
        comeback.freed(100)
        assert [comeback.after_s(129, n, 60) for n in (9, 99)] == [LONGEST_S] * 2

    def test_without_any_that_ended_the_next_to_end_tells(self):
        assert Comeback().after_s(100, 0, 3.2) == 4
        # Most are deleted long before they end by themselves.
        assert Comeback().after_s(100, 0, 3600) == 5

    def test_promises_are_forgotten_as_time_goes_by(self):
        comeback = Comeback()
        comeback.freed(100)
        comeback.freed(100.5)
        assert comeback.after_s(101, 50, 60) > 20
        for n in range(100):
            comeback.freed(180 + n / 100)
        assert comeback.after_s(181, 0, 60) == 1
