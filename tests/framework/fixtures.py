"""Fixtures every tier may use; loaded by `conftest`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.framework import images
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

StartDaemon = Callable[..., Daemon]


@pytest.fixture(scope="session")
def busybox() -> Path:
    return images.busybox_image()


@pytest.fixture(scope="session")
def daemon(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    """The run's daemon, with the image `busybox` in use; for tests that leave it as it was."""
    with running_daemon(leak_check, {"busybox": busybox}) as started:
        started.warm_up("busybox")
        yield started


@pytest.fixture
def start_daemon(leak_check: LeakCheck, busybox: Path) -> Iterator[StartDaemon]:
    """Starts daemons of the test's own, to be killed, starved or configured at will.

    Takes `images` (name: SIF file; default busybox), `arguments` and `environment`.
    """
    with contextlib.ExitStack() as stack:

        def start(
            images: dict[str, Path] | None = None,
            arguments: tuple[str, ...] = (),
            environment: dict[str, str] | None = None,
        ) -> Daemon:
            known = images if images is not None else {"busybox": busybox}
            return stack.enter_context(running_daemon(leak_check, known, arguments, environment))

        yield start


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[str]:
    """The id of a fresh busybox sandbox."""
    with daemon.sandbox("busybox") as name:
        yield name
