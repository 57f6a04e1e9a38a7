"""Images and daemons that several files of this tier share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import image_factory
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

NEEDS = pytest.mark.needs("root", "namespaces", "overlay", "fuse", "cgroup-kill", "cgroup-limits")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(NEEDS)


@pytest.fixture(scope="session")
def bulky() -> Path:
    return image_factory.bulky_image()


@pytest.fixture(scope="session")
def configured() -> Path:
    return image_factory.configured_image()


@pytest.fixture(scope="session")
def python_image() -> Path:
    return image_factory.python_image()


@pytest.fixture(scope="module")
def configured_daemon(leak_check: LeakCheck, configured: Path, busybox: Path) -> Iterator[Daemon]:
    """A daemon whose image `configured` has an environment, a user and a working directory."""
    with running_daemon(leak_check, {"configured": configured, "busybox": busybox}) as daemon:
        daemon.warm_up("configured")
        daemon.warm_up("busybox")
        yield daemon
