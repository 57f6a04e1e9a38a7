"""What every test of this tier needs; its rounds are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import image_factory

NEEDS = pytest.mark.needs("root", "namespaces", "overlay", "fuse", "cgroup-kill", "cgroup-limits")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(NEEDS)


@pytest.fixture(scope="session")
def bulky() -> Path:
    return image_factory.bulky_image()
