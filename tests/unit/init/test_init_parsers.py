"""The parsers of the C init, built with ASan and UBSan, under mutated input.

``SANDBOXD_TESTS_FUZZ_ITERATIONS`` (for each target; default 60,000) and
``SANDBOXD_TESTS_FUZZ_SEED`` make it longer or other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.init import build

ITERATIONS = int(os.environ.get("SANDBOXD_TESTS_FUZZ_ITERATIONS", "60000"))
SEED = int(os.environ.get("SANDBOXD_TESTS_FUZZ_SEED", "1"))
LINKED = ("wire.c", "command.c", "user.c", "path.c", "sys.c")

pytestmark = pytest.mark.timeout(0)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler")
    return build.build(
        tmp_path_factory.mktemp("fuzz") / "fuzz_parsers",
        sanitize=True,
        c_files=[
            Path(__file__).with_name("fuzz_parsers.c"),
            *(build.SOURCE_DIR / name for name in LINKED),
        ],
        extra_flags=("-I", str(build.SOURCE_DIR)),
    )


@pytest.fixture
def quick_directory(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: a disk takes twenty times as long."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="sandboxd-test-", dir="/dev/shm") as name:
        yield Path(name)


def test_no_input_breaks_a_parser(fuzzer: Path, quick_directory: Path):
    command = [fuzzer, str(SEED), str(ITERATIONS), quick_directory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accepted = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    assert accepted.keys() == {"wire", "command", "user", "path"}
    # Neither all nor nothing, or the inputs do not reach what they are for.
    assert all(0.05 < count / ITERATIONS < 0.95 for count in accepted.values()), accepted


def test_the_whole_program_builds_with_the_sanitizers_and_tells_its_version(tmp_path: Path):
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler")
    program = build.build(tmp_path / "sandbox_init", sanitize=True)
    done = subprocess.run([program, "version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n")
    for arguments in ((), ("pid1",), ("version", "more")):
        assert subprocess.run([program, *arguments], check=False).returncode == 2
