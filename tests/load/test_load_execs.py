"""A hundred thousand commands, a thousand at a time, over two hundred sandboxes."""

from __future__ import annotations

import os

import pytest

from tests.framework.daemon import Daemon
from tests.framework.fixtures import StartDaemon
from tests.framework.many_execs import many_execs

EXECS = int(os.environ.get("SANDBOXD_TESTS_LOAD_EXECS", "100000"))


@pytest.fixture
def roomy(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(arguments=("--max-sandboxes", "256"))


@pytest.mark.timeout(3600)
def test_every_byte_and_code_is_its_own_commands(roomy: Daemon):
    figures = many_execs(roomy, sandboxes=200, at_once=1000, execs=EXECS)
    print(figures)
    assert figures.wrong == []
