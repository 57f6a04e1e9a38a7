"""The machines of the workloads: a daemon with each of the images, and both kinds of user.

A module that is in the short set says so with the marker `e2e`, and runs in CI; `scripts/test
workloads` runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.workloads import machines
from tests.e2e.workloads.machine import Machine, machine
from tests.framework.daemon import running_daemon
from tests.framework.leaks import LeakCheck

MakeMachine = Callable[..., AbstractContextManager[Machine]]
BUILD_S = 1200
"""The first test with an image builds it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(BUILD_S))


@pytest.fixture(params=["root", "agent"])
def user(request: pytest.FixtureRequest) -> str:
    """Whom the programs run as: the sandbox's root, and an ordinary user."""
    return str(request.param)


def _daemon(check: LeakCheck, image: str, file: Path) -> Iterator[MakeMachine]:
    with running_daemon(check, {image: file}) as daemon:
        daemon.warm_up(image)
        yield partial(machine, daemon, image)


@pytest.fixture(scope="session")
def tools(leak_check: LeakCheck) -> Iterator[MakeMachine]:
    yield from _daemon(leak_check, "tools", machines.tools())


@pytest.fixture(scope="module")
def languages(leak_check: LeakCheck) -> Iterator[MakeMachine]:
    yield from _daemon(leak_check, "languages", machines.languages())


@pytest.fixture(scope="module")
def servers(leak_check: LeakCheck) -> Iterator[MakeMachine]:
    yield from _daemon(leak_check, "servers", machines.servers())


@pytest.fixture(scope="module")
def browser(leak_check: LeakCheck) -> Iterator[MakeMachine]:
    yield from _daemon(leak_check, "browser", machines.browser())
