"""A few seconds of each kind of hostile sandbox: the neighbour works, and nothing is left.

How much later the neighbour is served is asked in tier `load`, for a minute of each.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import hostile
from tests.framework.daemon import Daemon
from tests.security.probing import alive, build, install


@pytest.fixture(scope="session")
def hog(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"hog": build("hog", tmp_path_factory.mktemp("programs"))}


@pytest.mark.parametrize("name", hostile.KINDS)
def test_a_hostile_sandbox_is_alone_with_it(daemon: Daemon, hog: dict[str, Path], name: str):
    kind = hostile.KINDS[name]
    with daemon.sandbox("busybox", limits=hostile.LIMITS) as sandbox:
        install(daemon, sandbox, hog)
        felt, _ = hostile.beside(daemon, sandbox, kind, seconds=2, quiet_s=0.1)
        assert len(felt.beside) > 1
        hostile.clean(daemon, sandbox)
        alive(daemon, sandbox)
