"""A minute of each kind of hostile sandbox beside a neighbour, whose times are compared with those
it has alone. Quiet and hostile stints take turns, so that what else the machine does is in both;
still, the figures are a quiet machine's to give. All of it takes 20 minutes.

``SANDBOXD_TESTS_HOSTILE_S`` has another number of seconds for each kind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import hostile
from tests.e2e.at_once import client_of
from tests.framework.daemon import Daemon
from tests.security.probing import alive, build, install

HOSTILE_S = float(os.environ.get("SANDBOXD_TESTS_HOSTILE_S", "60"))
QUIET_S = min(6.0, HOSTILE_S / 2)
STINTS = 3
TOGETHER_S = min(20.0, HOSTILE_S)
MOST_TIMES = 3.0
ORPHANS_PER_S = 10_000 / 60
"""So many in the minute, or it was none."""

Rows = list[tuple[str, list[str]]]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Rows]:
    """What each kind was felt as, shown when all are done."""
    rows: Rows = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    shown = contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled()
    with shown:
        print(f"\n{'beside':20} {'quiet n: p50 p99':>22} {'hostile n: p50 p99':>22} {'ratio':>6}")
        for name, (quiet, beside, ratio) in rows:
            print(f"{name:20} {quiet:>22} {beside:>22} {ratio:>6}")


@pytest.fixture(scope="module")
def hog(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"hog": build("hog", tmp_path_factory.mktemp("hog"))}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", hostile.KINDS)
def test_a_neighbour_is_hardly_later(
    daemon: Daemon, hog: dict[str, Path], table: Rows, name: str
) -> None:
    kind = hostile.KINDS[name]
    with daemon.sandbox("busybox", limits=hostile.LIMITS) as sandbox:
        install(daemon, sandbox, hog)
        felt, said = hostile.beside(
            daemon, sandbox, kind, seconds=HOSTILE_S, quiet_s=QUIET_S, stints=STINTS
        )
        table.append((name, felt.cells()))
        hostile.clean(daemon, sandbox)
        alive(daemon, sandbox)
    assert felt.ratio <= MOST_TIMES, str(felt)
    if name == "orphans":
        made = said.count(f"{hostile.ORPHANS} enough") * hostile.ORPHANS
        assert made >= ORPHANS_PER_S * HOSTILE_S


@pytest.mark.timeout(300)
def test_all_kinds_at_once(daemon: Daemon, hog: dict[str, Path], table: Rows) -> None:
    """More CPUs are asked for than there are, so the neighbour's times are shown and not judged:
    that it is served, and that nothing is left."""
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
                    pool.submit(hostile.rage, daemon, sandbox, hostile.KINDS[name], TOGETHER_S)
                    for name, sandbox in sandboxes.items()
                ]
                felt.beside = hostile.lives(client, TOGETHER_S - 2)
                for one in raging:
                    one.result()
        table.append(("all at once", felt.cells()))
        for sandbox in sandboxes.values():
            hostile.clean(daemon, sandbox)
            alive(daemon, sandbox)
