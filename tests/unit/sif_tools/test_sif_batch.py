"""`sif-tools convert --batch`, as it is run: many images, some broken, processes that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sif_tools.batch.run import Standing
from sif_tools.batch.workers import Task, Workers, WorkOptions
from sif_tools.cli.store_convert import standing_table
from sif_tools.sources.source import SourceOptions
from sif_tools.store.keeper import KeepOptions, make_store
from tests.unit.sif_tools.random_images import ImageMaker, layout_of
from tests.unit.sif_tools.store_readers import assert_readers_see_whole_files, files

REPOSITORY = Path(__file__).resolve().parents[3]
IMAGES = 8


@pytest.fixture(scope="module")
def oci(tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker = ImageMaker(21)
    maker.layer(40)
    images = {}
    for number in range(IMAGES):
        one = maker.copy(number)
        one.layer(8)
        images[f"t{number}"] = one.layers
    directory = layout_of(tmp_path_factory.mktemp("batch") / "oci", images)
    # One image's own layer is damaged: same size, other bytes.
    index = json.loads((directory / "index.json").read_text())
    digest = index["manifests"][IMAGES - 1]["digest"].partition(":")[2]
    blobs = directory / "blobs" / "sha256"
    layer = json.loads((blobs / digest).read_text())["layers"][-1]["digest"].partition(":")[2]
    data = bytearray((blobs / layer).read_bytes())
    data[600] ^= 1
    (blobs / layer).write_bytes(data)
    return directory


def batch(scratch: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = ["convert", "--batch", str(scratch / "list"), "--store", str(scratch / "store")]
    done = subprocess.run(
        [sys.executable, "-m", "sif_tools", *command, "--json", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def write_list(scratch: Path, oci: Path) -> None:
    lines = [f"oci:{oci}:t{number} task/{number}\n" for number in range(IMAGES)]
    lines.insert(2, f"oci:{scratch}/nowhere:x missing\n")
    (scratch / "list").write_text("".join(lines))


def test_failures_stop_nothing_and_a_resumed_batch_does_the_rest(oci: Path, tmp_path: Path) -> None:
    write_list(tmp_path, oci)
    status, report, _ = batch(tmp_path, "--report", str(tmp_path / "report"))
    assert status == 1
    assert (report["images"], report["done"], report["failed"]) == (IMAGES + 1, IMAGES - 1, 2)
    assert {one["name"]: one["code"] for one in report["failures"]} == {
        "missing": "bad-source",
        f"task/{IMAGES - 1}": "digest-mismatch",
    }
    assert json.loads((tmp_path / "report").read_text())["failures"] == report["failures"]
    store = tmp_path / "store"
    assert_readers_see_whole_files(store)
    before = files(store)
    _, again, _ = batch(tmp_path)
    assert (again["found"], again["converted"], again["written_bytes"]) == (IMAGES - 1, 0, 0)
    assert files(store) == before
    # Without its journal, too.
    (tmp_path / "list.journal").unlink()
    _, again, _ = batch(tmp_path)
    assert (again["found"], again["converted"]) == (IMAGES - 1, 0)
    assert files(store) == before


def test_what_the_journal_has_and_the_store_has_not_is_made_again(
    oci: Path, tmp_path: Path
) -> None:
    write_list(tmp_path, oci)
    batch(tmp_path)
    for path in (tmp_path / "store" / "objects").rglob("*.sif"):
        path.unlink()
    _, report, _ = batch(tmp_path)
    assert (report["found"], report["converted"]) == (0, IMAGES - 1)
    assert_readers_see_whole_files(tmp_path / "store")


def test_two_batches_over_one_list_at_once(oci: Path, tmp_path: Path) -> None:
    write_list(tmp_path, oci)
    command = [sys.executable, "-m", "sif_tools", "convert", "--json"]
    command += ["--batch", str(tmp_path / "list"), "--store", str(tmp_path / "store")]
    running = [
        subprocess.Popen(
            [*command, "--journal", str(tmp_path / f"journal-{number}")],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    reports = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    assert [report["done"] for report in reports] == [IMAGES - 1] * 3
    store = tmp_path / "store"
    assert_readers_see_whole_files(store)
    on_disk = sum(path.stat().st_size for path in (store / "objects").rglob("*.sif"))
    assert sum(report["written_bytes"] for report in reports) == on_disk


def test_a_worker_that_dies_is_replaced_and_its_task_done(oci: Path, tmp_path: Path) -> None:
    layout = make_store(tmp_path / "store")
    options = WorkOptions(layout.root, KeepOptions(), SourceOptions(), None)
    tasks = [Task(number, f"oci:{oci}:t{number}", f"n{number}", (1,)) for number in range(5)]
    outcomes = {}
    with Workers(options, 2) as workers:
        running = workers.run(tasks)
        first = next(running)
        outcomes[first.number] = first
        for worker in workers._workers:
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGKILL)
        outcomes |= {outcome.number: outcome for outcome in running}
    assert sorted(outcomes) == [0, 1, 2, 3, 4]
    assert [one.error for one in outcomes.values()] == [None] * 5
    assert_readers_see_whole_files(layout.root)


def test_the_table_tells_what_is_left() -> None:
    one = Standing(100, done=30, found=10, failed=5)
    one.started_at -= 40
    assert one.left_s == pytest.approx(65 * 40 / 20, rel=0.01)
    assert len(standing_table(one).columns) == 8
    assert Standing(10, done=10, found=10).left_s == 0
    assert Standing(10, done=5, found=5).left_s is None
