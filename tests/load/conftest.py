"""What every test of this tier needs; their figures are printed (``scripts/test load -- -s``)."""

from __future__ import annotations

from pathlib import Path

import pytest

NEEDS = pytest.mark.needs("root", "namespaces", "overlay", "fuse", "cgroup-kill", "cgroup-limits")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(NEEDS)
