"""What an operator is told of ``security.*`` attributes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandboxd.linux import bpf_lsm, features_attributes
from sandboxd.linux.findings import Findings, Probe, Status
from sandboxd.linux.id_ranges import IdRange
from sandboxd.linux.probes import attributes

IDS = IdRange(2_000_000_000, 65_536)


def told(
    monkeypatch: pytest.MonkeyPatch, answers: list[bool], rule: OSError | None = None
) -> tuple[str, Probe]:
    """``answers``: whether anybody may, without and then with the node's rule."""
    asked = iter(answers)

    def refuse(ids: IdRange) -> int:
        assert ids == IDS
        if rule is not None:
            raise rule
        return os.open("/dev/null", os.O_RDONLY)

    def may(map_ids: object, uid: int) -> bool:
        asked_as.append(uid)
        return next(asked)

    asked_as: list[int] = []
    monkeypatch.setattr(attributes, "anybody_may_set_them", may)
    monkeypatch.setattr(bpf_lsm, "refuse_security_attributes", refuse)
    found = Findings()
    who = features_attributes.find(found, lambda pid: None, IDS, 65_536)
    # Not as one whom the rule of a node that runs already is for.
    assert asked_as == [65_536, 0][: len(answers)]
    assert next(asked, None) is None
    (probe,) = found.probes
    return who, probe


def test_a_kernel_that_refuses_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    who, probe = told(monkeypatch, [False])
    assert (who, probe.status) == ("kernel", Status.OK)


def test_where_it_does_not_a_rule_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    who, probe = told(monkeypatch, [True, False])
    assert (who, probe.status) == ("program", Status.OK)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("answers", "rule", "why"),
    [
        ([True, True], None, "does not hold"),
        ([True], PermissionError(1, "Operation not permitted", "load"), "not permitted (load)"),
    ],
)
def test_a_wall_that_stays_open_is_a_warning_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answers: list[bool],
    rule: OSError | None,
    why: str,
) -> None:
    lsms = tmp_path / "lsm"
    lsms.write_text("lockdown,capability,landlock,yama,apparmor,tomoyo,bpf")
    monkeypatch.setattr(attributes, "LSMS", lsms)
    who, probe = told(monkeypatch, answers, rule)
    assert (who, probe.status) == ("nobody", Status.WARN)
    assert why in probe.detail
    assert "lsm=lockdown,landlock,yama,apparmor,tomoyo," in probe.remedy


def test_the_remedy_needs_no_securityfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attributes, "LSMS", tmp_path / "none")
    assert "lsm=" in attributes.remedy()
