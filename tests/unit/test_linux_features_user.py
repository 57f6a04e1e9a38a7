"""What an ordinary user is told of crashes in his sandboxes."""

from __future__ import annotations

import resource

import pytest

from sandboxd.linux import features_user, procfs
from sandboxd.linux.findings import Findings, Status


@pytest.mark.parametrize(
    ("pattern", "hard", "told"),
    [
        ("|/usr/lib/systemd/systemd-coredump %P", 0, True),
        ("|/usr/lib/systemd/systemd-coredump %P", resource.RLIM_INFINITY, False),
        ("core", 0, False),
    ],
)
def test_a_handler_that_a_crash_starts_is_told(
    monkeypatch: pytest.MonkeyPatch, pattern: str, hard: int, told: bool
):
    monkeypatch.setattr(procfs, "sysctl", lambda name: pattern)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, hard))
    found = Findings()
    features_user.core_dumps(found)
    assert [probe.status for probe in found.probes] == ([Status.WARN] if told else [])
