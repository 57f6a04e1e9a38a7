"""What ids an ordinary user's node has, by what the files of subordinate ids say."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from sandboxd.linux import programs, user_ids
from sandboxd.linux.user_ids import UserIds

WHO = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(autouse=True)
def mappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if installed."""
    monkeypatch.setattr(programs, "find_program", lambda name: Path("/usr/bin", name))


def find(tmp_path: Path, uids: str, gids: str | None = None) -> UserIds:
    (tmp_path / "subuid").write_text(uids)
    (tmp_path / "subgid").write_text(uids if gids is None else gids)
    return user_ids.find(tmp_path / "subuid", tmp_path / "subgid")


def outside(ids: UserIds, inside: int) -> int | None:
    """Which host id this one is, by user_namespaces(7)."""
    for first, host, count in ids.uids:
        if first <= inside < first + count:
            return host + inside - first
    return None


def test_a_whole_range_is_mapped_as_it_is(tmp_path: Path):
    ids = find(tmp_path, f"other:1:70000\n{WHO}:300000:65538\n")
    assert not ids.single
    assert [outside(ids, n) for n in (0, 65_535, 65_537)] == [300_000, 365_535, 365_537]
    assert (ids.sandbox_ids, ids.sandbox_last_id, ids.node_ids) == (65_536, 0, 65_538)


def test_by_number_as_well_as_by_name(tmp_path: Path):
    assert find(tmp_path, f"{os.geteuid()}:300000:70000\n").uids == ((0, 300_000, 65_538),)


def test_what_useradd_gives_is_enough(tmp_path: Path):
    """65,536 ids: two of a sandbox's less, as the node needs two."""
    ids = find(tmp_path, f"{WHO}:100000:65536\n")
    assert not ids.single
    used = [outside(ids, n) for n in range(65_538)]
    assert sorted(n for n in used if n is not None) == list(range(100_000, 165_536))
    assert [n for n in range(65_538) if used[n] is None] == [65_533, 65_535]
    assert outside(ids, 0) == 100_000
    assert (ids.sandbox_ids, ids.sandbox_last_id, ids.node_ids) == (65_533, 65_534, 65_536)


def test_users_and_groups_have_the_same_holes(tmp_path: Path):
    ids = find(tmp_path, f"{WHO}:100000:65540\n", f"{WHO}:900000:65536\n")
    assert [one[0] for one in ids.uids] == [one[0] for one in ids.gids] == [0, 65_534, 65_536]
    assert ids.gids[0][1] == 900_000


@pytest.mark.parametrize(
    ("uids", "gids", "named"),
    [
        ("", "", "subuid"),
        (f"{WHO}:100000:65536\n", "", "subgid"),
        (f"{WHO}:100000:65535\n", f"{WHO}:100000:65536\n", "subuid"),
    ],
)
def test_without_a_range_one_id_is_left_and_why_is_said(
    tmp_path: Path, uids: str, gids: str, named: str
):
    ids = find(tmp_path, uids, gids)
    assert ids.single
    assert str(tmp_path / named) in ids.why
    assert ids.uids == ((0, os.geteuid(), 1),)
    assert (ids.sandbox_ids, ids.sandbox_last_id, ids.node_ids) == (1, 0, 1)


def test_without_newuidmap_one_id_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "find_program", lambda name: None)
    ids = find(tmp_path, f"{WHO}:100000:65536\n")
    assert ids.single
    assert "newuidmap" in ids.why
