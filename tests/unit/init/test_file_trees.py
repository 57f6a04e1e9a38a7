"""The C operations on trees, with sanitizers: patterns by a reference, bounds, odd requests."""

from __future__ import annotations

import errno
import os
import random
import re
from pathlib import Path

import pytest

from sandboxd.init import protocol
from sandboxd.init.protocol import FileFilter, FileFlag, FileOp, Step
from tests.unit.init.file_driver import Driver


@pytest.fixture
def driver(file_program, tmp_path) -> Driver:
    (tmp_path / "root").mkdir()
    return Driver(file_program, tmp_path / "root")


def listed(driver: Driver, **request: object) -> set[str]:
    done = driver(FileOp.FILE_LIST, **request)
    assert done.step == Step.STEP_NONE, done
    return {one.path.decode() for one in done.entries}


def as_regex(pattern: str) -> re.Pattern[str]:
    """What a pattern means, as Python's expressions have it."""
    out, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            out, at = out + ".*", at + 2
        elif pattern[at] == "*":
            out, at = out + "[^/]*", at + 1
        elif pattern[at] == "?":
            out, at = out + "[^/]", at + 1
        else:
            out, at = out + re.escape(pattern[at]), at + 1
    return re.compile(out, re.DOTALL)


def matches(pattern: str, path: str) -> bool:
    text = path if "/" in pattern else path.rpartition("/")[2]
    return as_regex(pattern.removeprefix("/")).fullmatch(text) is not None


def test_patterns_as_a_reference_has_them(driver):
    rng = random.Random(3)
    paths = {"/".join(rng.choice("ab") * rng.randint(1, 2) for _ in range(rng.randint(1, 4)))
             for _ in range(120)}  # fmt: skip
    for path in paths:
        (driver.root / path).mkdir(parents=True, exist_ok=True)
    every = listed(driver)
    assert paths <= every
    parts = ("a", "b", "*", "?", "/", "/", "**/", "a*", "*b")
    found = 0
    for _ in range(120):
        pattern = re.sub("/+", "/", "".join(rng.choice(parts) for _ in range(rng.randint(1, 6))))
        # Three stars and what the reference takes apart another way.
        if "***" in pattern or re.search(r"[^/*]\*\*|\*\*[^/]", pattern) or pattern == "/":
            continue
        wanted = {path for path in every if matches(pattern, path)}
        assert listed(driver, filter=FileFilter(include=[pattern])) == wanted, pattern
        found += bool(wanted)
    assert found > 20


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("[a-c]", {"a", "b"}), ("[!a]", {"b", "*", "["}), ("[]]", set()), ("[", {"["}),
        (r"\*", {"*"}), (r"\a", {"a"}), ("[*]", {"*"}), ("[b-]", {"b"}), ("\\", set()), ("", set()),
    ],
)  # fmt: skip
def test_sets_and_escapes(driver, pattern, names):
    for name in ("a", "b", "*", "["):
        (driver.root / name).touch()
    assert listed(driver, filter=FileFilter(include=[pattern])) == names


def test_no_pattern_takes_for_ever(driver):
    (driver.root / ("a" * 250)).touch()
    assert listed(driver, filter=FileFilter(include=["*a" * 200 + "b"])) == set()
    assert listed(driver, filter=FileFilter(include=["**a" * 150 + "b"])) == set()


def test_a_list_says_that_a_bound_cut_it(driver):
    for n in range(10):
        (driver.root / str(n)).touch()
    for request, count in (({"entries": 4}, 4), ({"length": 6}, 6), ({"entries": 0}, 0)):
        done = driver(FileOp.FILE_LIST, **request)
        *entries, last = done.entries
        assert (len(entries), last.err, last.path) == (count, errno.E2BIG, b"")
    assert len(driver(FileOp.FILE_LIST, entries=10).entries) == 10


def test_a_removal_ends_at_its_bound(driver):
    (driver.root / "t/d").mkdir(parents=True)
    (driver.root / "t/d/f").touch()
    done = driver(FileOp.FILE_REMOVE, "/t", flags=FileFlag.FILE_RECURSIVE, entries=1)
    assert (done.step, done.index) == (Step.STEP_FILE_BOUND, 0)
    assert (driver.root / "t").exists()
    assert driver(FileOp.FILE_REMOVE, "/t", flags=FileFlag.FILE_RECURSIVE).exited.size == 1


@pytest.mark.parametrize("op", [op for op in FileOp if op is not FileOp.FILE_UNPACK])
@pytest.mark.parametrize("path", ["", "relative", "/" + "x/" * 3000, "/none/x", "/f/x", "/."])
def test_paths_that_lead_to_nothing(driver, op, path):
    (driver.root / "f").write_bytes(b"x")
    (driver.root / "keep").write_bytes(b"x")
    done = driver(op, path, b"" if op is FileOp.FILE_WRITE else None, other="0", length=0)
    if path != "/.":
        assert done.step in (Step.STEP_FILE_OPEN, Step.STEP_FILE_TYPE), done
    assert (driver.root / "keep").exists()


def test_requests_cut_anywhere_are_refused(driver):
    payload = protocol.file_payload(
        FileOp.FILE_LIST, user="0", path="/", filter=FileFilter(include=["a"], exclude=["b"])
    )
    for size in range(len(payload)):
        done = driver.raw(payload[:size])
        assert (done.step, done.errno) == (Step.STEP_MESSAGE, errno.EBADMSG)


def test_links_are_never_followed_below_a_root(driver, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"x")
    (driver.root / "t").mkdir()
    (driver.root / "t/l").symlink_to(outside)
    assert listed(driver, path="/t") == {"l"}
    driver(FileOp.FILE_CHMOD, "/t", mode=0o700, flags=FileFlag.FILE_RECURSIVE)
    assert driver(FileOp.FILE_REMOVE, "/t", flags=FileFlag.FILE_RECURSIVE).exited.size == 2
    assert os.listdir(outside) == ["f"]
    assert Path(outside).stat().st_mode & 0o777 == 0o755
