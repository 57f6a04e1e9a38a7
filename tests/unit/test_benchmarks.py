"""The bench's own arithmetic: what is said of samples, and what counts as reached."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the bench, which is no installed package."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


class TestStatistics:
    @pytest.mark.parametrize(("count", "rank"), [(1, 1), (50, 50), (100, 99), (300, 297)])
    def test_p99_is_the_nearest_rank(self, bench, count: int, rank: int) -> None:
        assert bench("measurements").p99([float(n) for n in range(count, 0, -1)]) == rank

    def test_a_summary_has_median_p99_and_count(self, bench) -> None:
        summary = bench("measurements").summarize([4.0, 1.0, 3.0, 100.0])
        assert (summary.p50, summary.p99, summary.count) == (3.5, 100.0, 4)

    def test_no_samples_are_no_figure(self, bench) -> None:
        with pytest.raises(ValueError, match="no samples"):
            bench("measurements").summarize([])

    def test_a_measure_has_one_unit(self, bench) -> None:
        measurements = bench("measurements")
        measured = measurements.Measurements()
        measured.add(measurements.Key("s", "m"), 1.0)
        with pytest.raises(ValueError, match="is in ms, not s"):
            measured.add(measurements.Key("s", "m", "bwrap"), 1.0, unit="s")

    def test_what_raises_is_no_sample(self, bench) -> None:
        measured = bench("measurements").Measurements()
        with pytest.raises(RuntimeError), measured.timed("s", "m"):
            raise RuntimeError
        assert measured.summaries() == {}
        with measured.timed("s", "m"):
            pass
        assert [summary.count for summary in measured.summaries().values()] == [1]


class TestTargets:
    @pytest.mark.parametrize(
        ("bounds", "p50", "p99", "other", "outcome", "bound"),
        [
            ({"most": 2.0}, 2.0, 9.0, None, "reached", 2.0),
            ({"most": 2.0}, 2.1, 9.0, None, "missed", 2.0),
            ({"most": 10.0, "statistic": "p99"}, 2.0, 9.0, None, "reached", 10.0),
            ({"most": 8.0, "statistic": "p99"}, 2.0, 9.0, None, "missed", 8.0),
            ({"least": 250.0}, 250.0, 250.0, None, "reached", 250.0),
            ({"least": 250.0}, 249.0, 249.0, None, "missed", 250.0),
            ({"times": 2.0}, 2.0, 9.0, 1.0, "reached", 2.0),
            ({"times": 2.0}, 2.1, 9.0, 1.0, "missed", 2.0),
            # Of two bounds, the harder one.
            ({"most": 1.8, "times": 2.0}, 1.9, 9.0, 1.0, "missed", 1.8),
            ({"most": 1.8, "times": 2.0}, 1.7, 9.0, 0.8, "missed", 1.6),
            ({"most": 1.8, "times": 2.0}, 1.7, 9.0, 1.0, "reached", 1.8),
            # With nothing to compare with, a miss is certain only by a bound that is known.
            ({"times": 2.0}, 2.0, 9.0, None, "not measured", None),
            ({"most": 1.8, "times": 2.0}, 1.9, 9.0, None, "missed", 1.8),
            ({"most": 1.8, "times": 2.0}, 1.7, 9.0, None, "not measured", 1.8),
        ],
    )
    def test_verdicts(self, bench, bounds, p50, p99, other, *, outcome, bound) -> None:
        targets, measurements = bench("targets"), bench("measurements")
        key, floor = measurements.Key("s", "m"), measurements.Key("s", "m", "floor")
        figures = {key: measurements.Summary(p50, p99, 100)}
        if other is not None:
            figures[floor] = measurements.Summary(other, 1000.0, 100)
        compared = {"other": floor} if "times" in bounds else {}
        verdict = targets.judge(targets.Target(key, **bounds, **compared), figures)
        assert (verdict.outcome, verdict.bound) == (outcome, bound)

    def test_what_was_not_measured_is_not_reached(self, bench) -> None:
        targets, measurements = bench("targets"), bench("measurements")
        verdict = targets.judge(targets.Target(measurements.Key("s", "m"), most=9.0), {})
        assert verdict.outcome == "not measured"

    @pytest.mark.parametrize(
        ("scenario", "measure", "statistic", "most"),
        [
            ("lifecycle, 1 client", "create", "p50", 2),
            ("lifecycle, 1 client", "create", "p99", 10),
            ("lifecycle, 1 client", "delete", "p50", 1.5),
            ("exec, 1 client", "exec", "p50", 1.8),
            ("exec, 1 client", "exec", "p99", 6),
            ("files: clean", "reset", "p50", 2),
            ("files: 500 MB", "reset", "p50", 2),
            ("files: 500 MB", "reset", "p99", 10),
            ("files: 500 MB", "snapshot", "p50", 3),
            ("files: 500 MB", "rollback", "p50", 2),
            ("files: 500 MB", "fork", "p50", 3),
            ("snapshot by copy, 10 MB in 1,000 files", "total", "p50", 40),
            ("snapshot by copy, 10 MB in 1,000 files", "frozen", "p50", 40),
            ("100 forks of one snapshot", "all", "p50", 400),
            ("burst of 1,000 creates", "all", "p50", 5),
            ("1,000 live", "memory", "p50", 0.75),
        ],
    )
    def test_what_was_promised(self, bench, scenario, measure, statistic, most) -> None:
        found = [
            one.most
            for one in bench("targets").MUST_REACH
            if (one.key.scenario, one.key.measure, one.statistic) == (scenario, measure, statistic)
        ]
        assert found == [most]

    def test_rates_and_multiples_that_were_promised(self, bench) -> None:
        table = bench("targets").MUST_REACH
        wanted = {(one.key.scenario, one.key.measure): one.wanted for one in table}
        assert wanted["lifecycle, 64 clients", "rate"] == "≥ 250"
        assert wanted["create without a slot", "create"] == "≤ 2 times create of floor_sandbox"
        assert wanted["1,000 live", "create"] == "≤ 2 times 10 live create of sandboxd"
        together = {one.other.subject for one in table if one.key.measure == "together"}
        assert together == {"bwrap", "crun, no limits"}


class TestReport:
    @pytest.fixture
    def run(self, bench):
        """A run in which create missed its target and delete reached it."""
        measurements, targets = bench("measurements"), bench("targets")
        measured = measurements.Measurements()
        for subject, values in (("floor", [1.0, 2.0, 3.0]), ("sandboxd", [5.0, 6.0, 7.0])):
            measured.add(measurements.Key("life", "create", subject), *values)
        measured.add(measurements.Key("life", "delete"), 1.0)
        measured.note("floor", "in C")
        table = [
            targets.Target(measurements.Key("life", "create"), most=4.0),
            targets.Target(measurements.Key("life", "delete"), most=4.0),
        ]
        return measured, targets.judge_all(table, measured.summaries())

    def test_the_document_holds_figures_targets_and_machine(self, bench, run) -> None:
        text = bench("report").to_text(bench("report").document(*run, {"cpus": 2}, "full"))
        node = json.loads(text)
        assert node["machine"] == {"cpus": 2}
        assert node["figures"]["life"]["create"] == {
            "unit": "ms",
            "subjects": {
                "floor": {"p50": 2.0, "p99": 3.0, "count": 3},
                "sandboxd": {"p50": 6.0, "p99": 7.0, "count": 3},
            },
        }
        assert [one["outcome"] for one in node["targets"]] == ["missed", "reached"]
        assert node["targets"][0]["bound"] == 4.0
        assert node["targets"][0]["value"] == 6.0
        assert node["subjects"] == {"floor": "in C"}
        assert node["failures"] == []

    def test_a_miss_is_red_and_ours_comes_first(self, bench, run) -> None:
        measured, verdicts = run
        figures = bench("report").figures_table(measured, verdicts)
        assert list(figures.columns[2].cells) == ["sandboxd", "floor", "sandboxd"]
        assert [row.style for row in figures.rows] == ["red", "dim", None]
        targets = bench("report").targets_table(verdicts)
        assert [row.style for row in targets.rows] == ["red", "green"]

    def test_a_busy_machine_is_told(self, bench) -> None:
        machine = bench("machine")
        assert machine.busy({"load_average": [0.9, 9.0, 9.0], "cpus": 2}) is None
        assert "1.5" in machine.busy({"load_average": [1.5, 0.0, 0.0], "cpus": 2})


class TestSoak:
    def test_growth_is_a_leak_and_less_is_none(self, bench) -> None:
        soak = bench("scenarios.soak")
        first = soak.Rest(10, 100, 50.0, 20, 8, 0, 1000.0)
        assert soak.leaks(first, first) == []
        assert soak.leaks(first, soak.Rest(9, 100, 50.0 + 24, 20, 8, 0, 1.0)) == []
        last = soak.Rest(11, 101, 75.0, 21, 9, 1, 1000.0)
        assert soak.leaks(first, last) == [
            "processes grew from 10 to 11",
            "descriptors grew from 100 to 101",
            "rss_mb grew from 50 to 75",
            "mounts grew from 20 to 21",
            "cgroups grew from 8 to 9",
            "sandboxes grew from 0 to 1",
        ]

    def test_the_last_quarter_may_not_be_much_slower_than_the_first(self, bench) -> None:
        drift = bench("scenarios.soak").drift
        assert drift([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.1, 3.1]) is not None
        assert drift([2.0, 2.0, 9.0, 9.0, 9.0, 9.0, 3.0, 3.0]) is None
        assert drift([2.0]) is None


def test_plots_are_not_written_into_the_repository(bench, tmp_path: Path) -> None:
    command = bench("command")
    assert command.output_folder(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(argparse.ArgumentTypeError, match="in the repository"):
        command.output_folder(str(SCRIPTS / "x"))


def test_each_scenario_has_a_plot_of_its_own(bench) -> None:
    names = {one.key.scenario for one in bench("targets").MUST_REACH}
    files = {bench("plots").file_name(name) for name in names}
    assert len(files) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in files)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (package gcc)")
class TestSampleProgram:
    @pytest.fixture
    def program(self, bench, tmp_path: Path):
        floors = bench("floors")
        started = []

        def start(*command: str):
            spawn = str(floors.compile_floor("spawn_command", tmp_path))
            words = tmp_path / "words"
            started.append(floors.SampleProgram("peer", [spawn, "-", *command], words))
            return started[-1]

        yield start
        for one in started:
            one.stop()

    def test_as_many_samples_as_asked_for(self, program) -> None:
        one = program("true")
        for count in (1, 3):
            samples = one.samples_ms(count)
            assert len(samples) == count
            assert all(value > 0 for value in samples)

    def test_a_wait_is_in_the_sample(self, program) -> None:
        assert program("sleep", "0.05").samples_ms(1)[0] >= 50

    def test_a_failure_is_told_in_its_own_words(self, program, bench) -> None:
        one = program(sys.executable, "-c", "import sys; sys.exit('out of luck')")
        with pytest.raises(bench("floors").FloorError, match="out of luck"):
            one.samples_ms(1)
