"""Converters that are killed, that meet each other, that find no room: readers see whole files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sif_tools.store.steps import Step
from tests.unit.sif_tools.random_images import ImageMaker, layout_of
from tests.unit.sif_tools.store_readers import (
    assert_readers_see_whole_files,
    files,
    leftovers,
)

REPOSITORY = Path(__file__).resolve().parents[3]
CUTS = "1,2"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker = ImageMaker(5)
    for operations in (60, 20, 20):
        maker.layer(operations)
    other = maker.copy(6)
    other.layer(10)
    return layout_of(
        tmp_path_factory.mktemp("faults") / "oci", {"one": maker.layers, "other": other.layers}
    )


def converter(
    store: Path, layout: Path, step: str = "-", passes: int = 0, *, tag: str = "one"
) -> subprocess.Popen[str]:
    module = ("-m", "tests.unit.sif_tools.store_process")
    reference = f"oci:{layout}:{tag}"
    return subprocess.Popen(
        [sys.executable, *module, str(store), reference, tag, CUTS, step, str(passes)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize("passes", [0, 2], ids=["of the base", "of the delta"])
@pytest.mark.parametrize("step", list(Step))
def test_killed_at_a_step(step: Step, passes: int, layout: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    status, _ = finished(converter(store, layout, step, passes))
    if step is Step.NAMED and passes:
        assert status == 0  # a name is given once
    else:
        assert status == -signal.SIGKILL
    if store.exists():
        assert_readers_see_whole_files(store)
    # The next one finds the claim of a dead process, and does what is left to do.
    started_at = time.monotonic()
    status, said = finished(converter(store, layout))
    assert status == 0
    assert time.monotonic() - started_at < 30
    assert_readers_see_whole_files(store)
    before = files(store)
    status, again = finished(converter(store, layout))
    assert (status, again.split()) == (0, [said.split()[0], "0"])
    assert files(store) == before


def test_many_at_once_build_once(layout: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    running = [
        converter(store, layout, tag=tag) for tag in ("one", "other", "one", "other", "one", "one")
    ]
    answers = [finished(process) for process in running]
    assert [status for status, _ in answers] == [0] * 6
    assert_readers_see_whole_files(store)
    assert leftovers(store) == []
    keys = [said.split()[0] for _, said in answers]
    assert len(set(keys)) == 2
    # Everything was written by one of them, and by no other.
    written = sum(int(said.split()[1]) for _, said in answers)
    assert written == sum(path.stat().st_size for path in (store / "objects").rglob("*.sif"))


def test_killed_at_random_while_others_go_on(layout: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        while not stop.is_set():
            try:
                if store.exists():
                    assert_readers_see_whole_files(store)
            except BaseException as error:  # noqa: BLE001 - told in the test's own thread
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(4):
            some = [converter(store, layout, tag=tag) for tag in ("one", "other")]
            time.sleep(0.35 + 0.05 * number)  # not for a state: any moment will do
            for process in some:
                process.kill()
                process.communicate()
        assert finished(converter(store, layout))[0] == 0
        assert finished(converter(store, layout, tag="other"))[0] == 0
    finally:
        stop.set()
        reader.join()
    assert failures == []
    assert_readers_see_whole_files(store)


def test_a_claim_of_another_host_is_waited_for_until_it_is_old(
    layout: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert finished(converter(store, layout, Step.CLAIMED))[0] == -signal.SIGKILL
    (claim,) = (store / "claims").iterdir()
    claim.write_text(claim.read_text().replace('"host": "', '"host": "elsewhere-'))
    started_at = time.monotonic()
    assert finished(converter(store, layout))[0] == 0
    assert time.monotonic() - started_at > 1.0  # stale_s of the process
    assert_readers_see_whole_files(store)


@pytest.mark.parametrize("offset_s", [-3600, 3600])
def test_a_claim_whose_time_stamp_comes_of_a_wrong_clock(
    offset_s: int, layout: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert finished(converter(store, layout, Step.CLAIMED))[0] == -signal.SIGKILL
    (claim,) = (store / "claims").iterdir()
    claim.write_text("")  # killed before it said who it was
    os.utime(claim, (time.time() + offset_s, time.time() + offset_s))
    assert finished(converter(store, layout))[0] == 0
    assert_readers_see_whole_files(store)


def test_a_claim_of_before_the_last_boot_is_void_at_once(layout: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert finished(converter(store, layout, Step.CLAIMED))[0] == -signal.SIGKILL
    (claim,) = (store / "claims").iterdir()
    text = claim.read_text().replace('"boot": "', '"boot": "0')
    # The process lives, as far as its number goes.
    claim.write_text(text.replace('"pid": ', '"pid": 1, "was": '))
    assert finished(converter(store, layout))[0] == 0
    assert leftovers(store) == []
