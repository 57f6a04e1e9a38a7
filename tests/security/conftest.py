"""The ways out: the probe programs, who runs them, through what, and the table at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework.daemon import Daemon
from tests.security.probing import CHANNELS, IDENTITIES, Host, Inside, build, install

TABLE: pytest.StashKey[dict[str, dict[str, list[str]]]] = pytest.StashKey()
ANSWERS: pytest.StashKey[dict[str, dict[str, str]]] = pytest.StashKey()
HERE = Path(__file__).parent.name


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`probe` and `hog`, static, by name."""
    directory = tmp_path_factory.mktemp("programs")
    return {name: build(name, directory) for name in ("probe", "hog")}


@pytest.fixture(scope="session")
def host(programs: dict[str, Path]) -> Host:
    """The control: the same tries by the host's root."""
    return Host(programs["probe"])


@pytest.fixture(scope="session")
def standing(daemon: Daemon, programs: dict[str, Path]) -> Iterator[str]:
    """A sandbox with the probe programs, for all tests that leave it as it was."""
    with daemon.sandbox("busybox") as name:
        install(daemon, name, programs)
        yield name


@pytest.fixture
def hostile(daemon: Daemon, programs: dict[str, Path]) -> Iterator[str]:
    """A sandbox with the probe programs, of the test's own."""
    with daemon.sandbox("busybox") as name:
        install(daemon, name, programs)
        yield name


@pytest.fixture(params=IDENTITIES)
def identity(request: pytest.FixtureRequest) -> str:
    """Whom a try is made as: the sandbox's root, and an ordinary user."""
    return str(request.param)


@pytest.fixture(params=CHANNELS)
def channel(request: pytest.FixtureRequest) -> str:
    """By what way a command comes into the sandbox."""
    return str(request.param)


@pytest.fixture
def inside(daemon: Daemon, standing: str, identity: str, channel: str) -> Inside:
    """Makes tries in the standing sandbox, once as each identity and through each channel."""
    return Inside(daemon, standing, identity, channel)


@pytest.fixture
def as_root(daemon: Daemon, standing: str, channel: str) -> Inside:
    """Makes tries in the standing sandbox as its root, through each channel."""
    return Inside(daemon, standing, "root", channel)


@pytest.fixture
def record_answers(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    """Takes the answers to tries, by word, of each way into a sandbox: for the table."""
    return request.config.stash[ANSWERS]


# --- the table ---------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = defaultdict(lambda: defaultdict(list))
    config.stash[ANSWERS] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report = yield
    if HERE in item.path.parts and (report.when == "call" or report.outcome != "passed"):
        group = item.path.stem.removeprefix("test_").replace("_", " ")
        params = getattr(item, "callspec", None)
        words = {
            name: value
            for name, value in (params.params if params else {}).items()
            if name not in ("identity", "channel")
        }
        probe = f"{getattr(item, 'originalname', item.name)}{sorted(map(str, words.values()))}"
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        item.config.stash[TABLE][group][probe].append(outcome)
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    table = config.stash.get(TABLE, None)
    if not table:
        return
    terminalreporter.section("ways out of a sandbox")
    head = f"{'group':24}{'probes':>8}{'runs':>8}{'held':>8}{'open':>8}{'failed':>8}{'skipped':>9}"
    terminalreporter.write_line(head)
    total = [0] * 6
    for group, probes in sorted(table.items()):
        runs = [outcome for outcomes in probes.values() for outcome in outcomes]
        counts = [runs.count(word) for word in ("passed", "xfailed", "failed", "skipped")]
        row = [len(probes), len(runs), *counts]
        total = [a + b for a, b in zip(total, row, strict=True)]
        terminalreporter.write_line(_row(group, row))
    terminalreporter.write_line(_row("all", total))
    if answers := config.stash[ANSWERS]:
        _write_answers(terminalreporter, answers)


def _write_answers(
    terminalreporter: pytest.TerminalReporter, answers: dict[str, dict[str, str]]
) -> None:
    """Probes by channels: as root and as agent, `-` for what was denied and `+` for what was let
    pass."""
    terminalreporter.section("probes by channel, as root and as agent: - denied, + let pass")
    ways = list(dict.fromkeys(way.rpartition("/")[0] for way in answers))
    for index, way in enumerate(ways):
        terminalreporter.write_line(f"{'':40}{'|  ' * index}{way}")
    for word in dict.fromkeys(word for column in answers.values() for word in column):
        cells = []
        for way in ways:
            found = [answers.get(f"{way}/{who}", {}).get(word, "?") for who in IDENTITIES]
            cells.append("".join("+" if one.startswith("ok") else "-" for one in found))
        terminalreporter.write_line(f"{word[:38]:40}{' '.join(cells)}")


def _row(group: str, row: list[int]) -> str:
    *most, last = row
    return f"{group:24}" + "".join(f"{number:8}" for number in most) + f"{last:9}"
