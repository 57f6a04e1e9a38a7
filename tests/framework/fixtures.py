"""Fixtures every tier may use; loaded by `conftest`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.framework import images as sources
from tests.framework import ordinary_user
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

ORDINARY_IDS = {"range": 65_538, "single": 0}

StartDaemon = Callable[..., Daemon]


@pytest.fixture(scope="session")
def busybox() -> Path:
    return sources.busybox_image()


@pytest.fixture(scope="session")
def daemon(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    """The run's daemon, with the image `busybox` in use; for tests that leave it as it was.

    With SANDBOXD_TESTS_DAEMON=range (or single) it is an ordinary user's, with subordinate ids or
    none: to see what of a tier holds there. Nothing that is run by default sets it.
    """
    kind = os.environ.get("SANDBOXD_TESTS_DAEMON", "")
    with contextlib.ExitStack() as stack:
        images = {"busybox": busybox}
        if kind:
            user = stack.enter_context(ordinary_user.ordinary_user(ORDINARY_IDS[kind]))
            made = ordinary_user.running_daemon(leak_check, images, user)
        else:
            made = running_daemon(leak_check, images)
        started = stack.enter_context(made)
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
