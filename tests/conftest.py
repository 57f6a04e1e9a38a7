"""Tiers, skips that may not be, feature gates, and the leak check around every privileged test."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from tests.framework import leaks, probes, tiers, times
from tests.framework.leaks import LeakCheck

pytest_plugins = ("tests.framework.fixtures",)


def pytest_configure(config: pytest.Config) -> None:
    tiers.must_run()  # a misspelt tier must not silently demand nothing
    tiers.parts()
    if times.factor() > 1:
        config.option.timeout = times.scaled(
            config.option.timeout or float(config.getini("timeout") or 0)
        )
    for name, meaning in tiers.TIERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "needs(*features): skip unless each feature works here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not tiers.in_parts(item.path)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if tiers.in_parts(item.path)]
    for item in items:
        if tier := tiers.tier_of(item.path):
            item.add_marker(tier)
        if (own := item.get_closest_marker("timeout")) and times.factor() > 1:
            item.add_marker(pytest.mark.timeout(times.scaled(own.args[0])), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for feature in marker.args:
            if reason := probes.missing(feature):
                pytest.skip(f"{feature} does not work here: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and tiers.skip_is_failure(item.path):
        report.outcome = "failed"
        report.longrepr = _refusal(report.longrepr)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself while it is imported."""
    report = yield
    if report.skipped and tiers.skip_is_failure(collector.path):
        report.outcome = "failed"
        report.longrepr = _refusal(report.longrepr)
    return report


def _refusal(longrepr: object) -> str:
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return f"{tiers.MUST_RUN} forbids this skip: {reason}"


@pytest.fixture(scope="session")
def leak_check(request: pytest.FixtureRequest) -> Iterator[LeakCheck]:
    """The run's leak check; it also compares the host before the first and after the last test."""
    check = LeakCheck(shared_host=os.environ.get("SANDBOXD_TESTS_SHARED_HOST") == "1")
    leaks.become_subreaper()
    with check.around("the test run"):
        yield check


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of a privileged tier that leaves anything behind.

    Autouse fixtures come first within their scope and end last: the baseline is taken after the
    wider fixtures (a daemon) are up, and the comparison after the test's own fixtures are gone.
    """
    if tiers.tier_of(request.path) not in tiers.LEAK_CHECKED:
        yield
        return
    check: LeakCheck = request.getfixturevalue("leak_check")
    try:
        with check.around(request.node.nodeid):
            yield
    finally:
        check.forbid_all()
