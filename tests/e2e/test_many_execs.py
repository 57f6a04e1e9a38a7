"""Two thousand commands, a hundred at a time; the load tier has a hundred thousand."""

from __future__ import annotations

import pytest

from tests.framework.daemon import Daemon
from tests.framework.many_execs import many_execs


@pytest.mark.timeout(300)
def test_every_byte_and_code_is_its_own_commands(daemon: Daemon):
    figures = many_execs(daemon, sandboxes=20, at_once=100, execs=2000)
    print(figures)
    assert figures.wrong == []
