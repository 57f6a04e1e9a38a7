"""What counts as a cgroup that was given to this process's user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandboxd.linux import delegation
from sandboxd.linux.cgroup import CgroupLayout
from sandboxd.linux.delegation import Delegated, NotDelegated


def a_cgroup(path: Path, controllers: str = "cpu memory pids", kind: str = "domain") -> Path:
    path.mkdir(parents=True)
    for name, text in (
        ("cgroup.procs", ""),
        ("cgroup.subtree_control", ""),
        ("cgroup.controllers", controllers),
        ("cgroup.type", kind),
    ):
        (path / name).write_text(text + "\n")
    return path


def find(path: Path) -> Delegated | NotDelegated:
    return delegation.find(CgroupLayout(path.parent, frozenset(), {}, {"": path}))


def test_one_that_can_be_written_to_is_given(tmp_path: Path) -> None:
    path = a_cgroup(tmp_path / "given")
    assert find(path) == Delegated(path, frozenset({"cpu", "memory", "pids"}))


def test_from_below_its_supervisor_too(tmp_path: Path) -> None:
    path = a_cgroup(tmp_path / "given")
    assert find(a_cgroup(path / "supervisor")) == find(path)


@pytest.mark.parametrize("name", ["cgroup.procs", "cgroup.subtree_control"])
def test_one_of_which_a_part_is_not_writable_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = a_cgroup(tmp_path / "given")
    monkeypatch.setattr(os, "access", lambda asked, mode: asked.name != name)
    found = find(path)
    assert isinstance(found, NotDelegated)
    assert "is not this user's" in found.why


@pytest.mark.parametrize("name", ["a.service", "session-1.scope", "app.slice"])
def test_a_unit_of_systemds_has_to_be_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without Delegate= its manager takes the controllers away again."""
    path = a_cgroup(tmp_path / name)
    marks: dict[str, bytes] = {}

    def getxattr(asked: Path, mark: str) -> bytes:
        if mark not in marks:
            raise OSError(61, "No data available", str(asked))
        return marks[mark]

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert isinstance(find(path), NotDelegated)
    marks["user.delegate"] = b"1"
    assert isinstance(find(path), Delegated)


def test_one_for_threads_is_not(tmp_path: Path) -> None:
    assert isinstance(find(a_cgroup(tmp_path / "given", kind="threaded")), NotDelegated)


@pytest.mark.parametrize(
    ("controllers", "limits"),
    [("cpu memory pids", True), ("memory pids", True), ("cpu pids", False), ("", False)],
)
def test_limits_need_memory_and_processes_both(
    tmp_path: Path, controllers: str, limits: bool
) -> None:
    found = find(a_cgroup(tmp_path / "given", controllers))
    assert isinstance(found, Delegated)
    assert found.limits is limits


def test_without_a_hierarchy_there_is_none(tmp_path: Path) -> None:
    found = delegation.find(CgroupLayout(None, frozenset()))
    assert isinstance(found, NotDelegated)
