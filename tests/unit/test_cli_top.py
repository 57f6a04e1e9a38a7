"""``sandboxd top``: rates between two looks, and the order of the table."""

import dataclasses
import datetime

import pytest

from sandboxd.cli.top import COLUMNS, Sample, Sort, rows
from sandboxd.client.results import SandboxInfo, Stats
from tests.unit.test_client import SANDBOX

AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NOTHING = {field.name: None for field in dataclasses.fields(Stats)}


def sample(sandbox, seconds, **figures):
    info = dataclasses.replace(
        SandboxInfo.from_json(SANDBOX),
        id=sandbox,
        created_at=AT - datetime.timedelta(seconds=figures.pop("age_s", 0)),
    )
    at = AT + datetime.timedelta(seconds=seconds)
    return Sample(info, Stats(**{**NOTHING, "at": at, **figures}))


def test_rates_are_those_between_two_looks():
    before = {"a": sample("a", 0, cpu_usage_s=1.0, io_read_bytes=0, io_written_bytes=1 << 20)}
    now = {"a": sample("a", 2, cpu_usage_s=2.0, io_read_bytes=4 << 20, io_written_bytes=1 << 20)}
    (row,) = rows(before, now)
    shown = dict(zip(COLUMNS, row, strict=True))
    assert (shown["CPU%"], shown["READ/S"], shown["WRITE/S"]) == ("50", "2.0M", "0.0M")
    assert shown["THROTTLED%"] == "-"
    (new,) = rows({}, now)
    assert dict(zip(COLUMNS, new, strict=True))["CPU%"] == "-"


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        (Sort.CPU, "cpu"),
        (Sort.MEMORY, "memory"),
        (Sort.DISK, "disk"),
        (Sort.IO, "io"),
        (Sort.PIDS, "pids"),
        (Sort.AGE, "old"),
    ],
)
def test_the_most_comes_first(sort, first):
    most = {
        "cpu": {"cpu_usage_s": 9.0},
        "memory": {"memory_used_bytes": 9},
        "disk": {"disk_used_bytes": 9},
        "io": {"io_read_bytes": 5, "io_written_bytes": 5},
        "pids": {"pids_count": 9},
        "old": {"age_s": 99},
    }
    zero = {"cpu_usage_s": 0.0, "io_read_bytes": 0, "io_written_bytes": 0}
    before = {name: sample(name, 0, **zero) for name in most}
    now = {name: sample(name, 1, **{**zero, **figures}) for name, figures in most.items()}
    table = rows(before, now, sort)
    assert table[0][0] == first
    assert {row[0] for row in table} == most.keys()
