"""Where the vectors are, and the gate for tests that need an outside tool."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the programs that these tests start, and some of them kill: its own directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The directory of real SIF files; skips where there is none."""
    given = os.environ.get("SIF_VECTORS")
    path = Path(given) if given else REPO_ROOT.parent / "shared" / "vectors"
    if not path.is_dir():
        pytest.skip(f"no SIF vectors at {path} (set SIF_VECTORS)")
    return path


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Ask for an outside program by name; skips the test naming it where it is missing."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"{name} is not installed")
        return path

    return find
