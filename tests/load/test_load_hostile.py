"""A minute of each kind of hostile sandbox beside a neighbour, whose times are compared with those
it has alone. The machine must be quiet: what else runs on it is felt too."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import hostile
from tests.e2e.at_once import client_of
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
        felt, said = hostile.beside(daemon, sandbox, kind, MINUTE_S, QUIET_S)
        with capsys.disabled():
            print(f"\n{name}: {felt}")
        assert daemon.exec(sandbox, "rm -rf /tmp/* /dev/shm/*")["exit_code"] == 0
        alive(daemon, sandbox)
    assert felt.ratio <= MOST_TIMES
    if name == "orphans":
        assert said.count(f"{hostile.ORPHANS} enough") * hostile.ORPHANS >= 10_000


@pytest.mark.timeout(300)
def test_all_kinds_at_once(daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """More CPUs are asked for than there are, so the neighbour's times are shown and not judged:
    that it is served, and that nothing is left."""
    hog = {"hog": build("hog", tmp_path)}
    with contextlib.ExitStack() as stack:
        sandboxes = {
            name: stack.enter_context(daemon.sandbox("busybox", limits=hostile.LIMITS))
            for name in hostile.KINDS
        }
        for sandbox in sandboxes.values():
            install(daemon, sandbox, hog)
        felt = hostile.Felt()
        with client_of(daemon) as client:
            felt.quiet = hostile.lives(client, QUIET_S)
            with ThreadPoolExecutor(len(sandboxes)) as pool:
                raging = [
                    pool.submit(hostile.rage, daemon, sandbox, hostile.KINDS[name], MINUTE_S)
                    for name, sandbox in sandboxes.items()
                ]
                felt.beside = hostile.lives(client, MINUTE_S - 2)
                for one in raging:
                    one.result()
        with capsys.disabled():
            print(f"\nall at once: {felt}")
        for sandbox in sandboxes.values():
            assert daemon.exec(sandbox, "rm -rf /tmp/* /dev/shm/*")["exit_code"] == 0
            alive(daemon, sandbox)
