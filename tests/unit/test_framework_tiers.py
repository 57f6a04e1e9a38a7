"""Folders give markers, and a demanded tier may not skip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.framework import tiers

TESTS = Path(__file__).parents[1]

CONFTEST = """
from pathlib import Path
from tests.framework import tiers
tiers._TESTS = Path(__file__).parent
from tests.conftest import *
"""
SKIPS = """
import pytest
def test_skip(): pytest.skip("no frobnicator")
@pytest.mark.xfail
def test_xfail(): assert False
@pytest.mark.needs("impossible")
def test_gated(): pass
"""


def test_the_innermost_tier_folder_names_the_tier() -> None:
    assert tiers.tier_of(TESTS / "unit" / "test_x.py") == "unit"
    assert tiers.tier_of(TESTS / "e2e" / "workloads" / "test_x.py") == "workloads"
    assert tiers.tier_of(TESTS / "framework" / "x.py") is None


def test_an_unknown_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiers.MUST_RUN, "kernel, e2ee")
    with pytest.raises(ValueError, match="no such tier: e2ee"):
        tiers.must_run()


def test_a_tier_within_a_demanded_one_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiers.MUST_RUN, "e2e")
    assert tiers.skip_is_failure(TESTS / "e2e" / "workloads" / "test_x.py")
    assert not tiers.skip_is_failure(TESTS / "kernel" / "test_x.py")


@pytest.mark.parametrize(
    ("demanded", "outcome"),
    [("", "3 skipped, 1 xfailed"), ("kernel", "1 failed, 1 xfailed, 2 errors")],
)
def test_skips_of_a_demanded_tier_fail(tmp_path: Path, demanded: str, outcome: str) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "kernel" / "test_skips.py").write_text(SKIPS)
    (tmp_path / "kernel" / "test_module.py").write_text(
        "import pytest\npytest.skip('not today', allow_module_level=True)"
    )
    gate = (
        "from tests.framework import probes\n"
        "def impossible(): raise probes.ProbeFailed('no frobnicator')\n"
        "probes.PROBES['impossible'] = impossible\n"
    )
    with (tmp_path / "conftest.py").open("a") as file:
        file.write(gate)
    environment = os.environ | {
        tiers.MUST_RUN: demanded,
        "PYTHONPATH": str(TESTS.parent),
        "SANDBOXD_TESTS_SHARED_HOST": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--continue-on-collection-errors", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert outcome in done.stdout.splitlines()[-1], done.stdout
    if demanded:
        assert "forbids this skip: Skipped: no frobnicator" in done.stdout


def test_parts_make_up_a_tier_and_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted((TESTS / "security").glob("test_*.py"))
    seen = []
    for part in (1, 2, 3):
        monkeypatch.setenv(tiers.PARTS, f"security:{part}/3")
        seen.append({file for file in files if tiers.in_parts(file)})
        assert abs(len(seen[-1]) - len(files) / 3) < 1
        assert tiers.in_parts(TESTS / "unit/test_framework_tiers.py"), "of another tier"
    assert set.union(*seen) == set(files)
    assert sum(map(len, seen)) == len(files)
    monkeypatch.setenv(tiers.PARTS, "security:1/3,security:3/3")
    assert {file for file in files if tiers.in_parts(file)} == seen[0] | seen[2]


@pytest.mark.parametrize("text", ["e2e", "e2e:0/4", "e2e:5/4", "nonsense:1/2", "e2e:1/4;unit:1/2"])
def test_what_is_no_part_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(tiers.PARTS, text)
    with pytest.raises(ValueError, match="is no part of a tier"):
        tiers.parts()
