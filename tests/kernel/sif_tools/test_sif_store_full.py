"""A store on a file system that is full: an error that says so, and nobody sees part of a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.framework import times
from tests.unit.sif_tools.image_factories import LayoutMaker, member, tar_bytes
from tests.unit.sif_tools.store_readers import assert_readers_see_whole_files, leftovers

pytestmark = pytest.mark.needs("root")

REPOSITORY = Path(__file__).resolve().parents[3]

# In a mount namespace of its own: fill a tmpfs, convert, let go of some, convert again.
SCRIPT = """
mount -t tmpfs -o size={size} tmpfs {store}
{convert} && exit 9
[ $? = 1 ] || exit 8
cp -a {store} {copy}-full
mount -o remount,size=64m {store}
{convert}
cp -a {store} {copy}-done
"""


@pytest.mark.parametrize("size_kib", [8, 64, 300, 1000, 1200])
def test_no_room(size_kib: int, tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "oci")
    base = tar_bytes([member("noise", os.urandom(900 << 10))])
    own = tar_bytes([member("more", os.urandom(300 << 10))])
    maker.add(maker.image([(base, base), (own, own)]), "one")
    layout = maker.finish()
    (tmp_path / "store").mkdir()
    (tmp_path / "list").write_text(f"oci:{layout}:one one\n")
    convert = (
        f"{sys.executable} -m sif_tools convert --batch {tmp_path}/list --store {tmp_path}/store"
        f" --jobs 1 --report {tmp_path}/report"
    )
    script = SCRIPT.format(
        size=f"{size_kib}k", store=tmp_path / "store", convert=convert, copy=tmp_path / "copy"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-uc", script + f"\ncat {tmp_path}/report >&2"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=times.scaled(60),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    full, whole = tmp_path / "copy-full", tmp_path / "copy-done"
    assert_readers_see_whole_files(full)
    assert leftovers(full) == []
    assert_readers_see_whole_files(whole)
    assert leftovers(whole) == []
    assert (whole / "names").exists()
    assert json.loads((tmp_path / "report").read_text())["failed"] == 0
