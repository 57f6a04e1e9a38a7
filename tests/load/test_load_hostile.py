"""A minute of each kind of hostile sandbox beside a neighbour, whose times are compared with those
it has alone. The machine must be quiet: what else runs on it is felt too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import hostile
from tests.framework.daemon import Daemon
from tests.security.probing import alive, build, install

MINUTE_S = 60.0
QUIET_S = 15.0
MOST_TIMES = 3.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", hostile.KINDS)
def test_a_neighbour_is_hardly_later(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    kind = hostile.KINDS[name]
    with daemon.sandbox("busybox", limits=hostile.LIMITS) as sandbox:
        install(daemon, sandbox, {"hog": build("hog", tmp_path)})
        felt, _ = hostile.beside(daemon, sandbox, kind, MINUTE_S, QUIET_S)
        with capsys.disabled():
            print(f"\n{name}: {felt}")
        assert daemon.exec(sandbox, "rm -rf /tmp/* /dev/shm/*")["exit_code"] == 0
        alive(daemon, sandbox)
    assert felt.ratio <= MOST_TIMES
