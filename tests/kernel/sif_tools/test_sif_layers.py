"""A base with its deltas, laid over each other as a node does it, is the flat image."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sif_tools
from sif_tools.sources.open import open_source
from sif_tools.store import lookup
from sif_tools.store.flatten import flatten
from sif_tools.store.keeper import Keeper, make_store
from tests.framework import times
from tests.unit.sif_tools.random_images import ImageMaker, layout_of

pytestmark = pytest.mark.needs("fuse", "overlay-tmpfs", "root")

# Everything a program could see, but for what each file system makes of a directory: its link
# count and size. Inodes are compared as groups: which names are one file. The root's own
# attributes are the writable layer's.
LISTING = r"""
import hashlib, os, stat, sys
from tests.framework import times
root = os.fsencode(sys.argv[1])
first = {}
for path, names, files in os.walk(root):
    names.sort()
    listed = sorted(os.listdir(path))
    assert listed == sorted(names + files)
    for name in listed:
        full = os.path.join(path, name)
        about = os.lstat(full)
        row = [full[len(root):], oct(about.st_mode), about.st_uid, about.st_gid, about.st_mtime]
        if not stat.S_ISDIR(about.st_mode):
            one = first.setdefault((about.st_dev, about.st_ino), row[0])
            row += [about.st_nlink, about.st_size, about.st_rdev, one]
        if stat.S_ISLNK(about.st_mode):
            row.append(os.readlink(full))
        else:
            xattrs = sorted(os.listxattr(full))
            row += [(key, os.getxattr(full, key)) for key in xattrs if "overlay" not in key]
        if stat.S_ISREG(about.st_mode):
            row.append(hashlib.sha256(open(full, "rb").read()).hexdigest())
        print(row)
"""


def mounted_listing(sifs: list[Path], scratch: Path) -> str:
    """The listing of SIFs, base first, stacked below a tmpfs as `rootfs.overlay` stacks them."""
    scratch.mkdir()
    script = [f"cd {scratch}; mkdir root top; root=$PWD/root; pids=; points="]
    script.append("trap 'umount root 2>/dev/null; for p in $points; do umount $p; done; wait' EXIT")
    server = shutil.which("squashfuse_ll")
    for number, sif in enumerate(sifs):
        parsed = sif_tools.read_sif(sif)
        offset = next(one.offset_bytes for one in parsed.descriptors if one.is_partition)
        script.append(
            f"mkdir l{number}; {server} -f -o offset={offset} {sif} l{number} & pid=$!; "
            f'until mountpoint -q l{number}; do kill -0 $pid; done; points="$points l{number}"'
        )
    lowers = ":".join(f"l{number}" for number in reversed(range(len(sifs))))
    script.append('mount -t tmpfs tmpfs top; points="$points top"; mkdir top/u top/w')
    script.append(
        f"mount -t overlay -o userxattr,lowerdir={lowers},upperdir=top/u,workdir=top/w overlay root"
    )
    script.append(f"{sys.executable} -c {shlex.quote(LISTING)} root")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", "\n".join(script)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=times.scaled(60),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def flat(reference: str, scratch: Path) -> str:
    sif = scratch / "flat.sif"
    sif_tools.convert(reference, sif, sif_tools.ConvertOptions(force=True))
    return mounted_listing([sif], scratch / "flat")


def stacked(keeper: Keeper, reference: str, cuts: tuple[int, ...], scratch: Path) -> str:
    with open_source(reference) as source:
        kept = keeper.keep(source, cuts)
    sifs = [one.path for one in lookup.stored_sifs(keeper.layout, kept.record)]
    assert len(sifs) == len(cuts) + 1
    return mounted_listing(sifs, scratch / "stacked")


CUTS = [(1,), (2,), (3,), (4,), (1, 2), (1, 3), (2, 3), (2, 4)]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_stack_shows_what_the_flat_image_shows(cuts: tuple[int, ...], tmp_path: Path) -> None:
    for seed in range(4):
        maker = ImageMaker(CUTS.index(cuts) * 100 + seed)
        for operations in (120, 30, 20, 20):
            maker.layer(operations)
        scratch = tmp_path / str(seed)
        layout = layout_of(scratch / "oci", {"one": maker.layers}, {"Env": ["A=b"]})
        reference = f"oci:{layout}:one"
        keeper = Keeper(make_store(scratch / "store"))
        expected = flat(reference, scratch)
        assert expected.count("\n") > 60
        assert stacked(keeper, reference, cuts, scratch) == expected


@pytest.mark.parametrize("cuts", [(2,), (1, 3)], ids=str)
def test_flattened_again_it_shows_the_same(cuts: tuple[int, ...], tmp_path: Path) -> None:
    for seed in range(3):
        maker = ImageMaker(1000 + seed)
        for operations in (120, 30, 20, 20):
            maker.layer(operations)
        scratch = tmp_path / str(seed)
        layout = layout_of(scratch / "oci", {"one": maker.layers})
        keeper = Keeper(make_store(scratch / "store"))
        with open_source(f"oci:{layout}:one") as source:
            kept = keeper.keep(source, cuts)
        sifs = [one.path for one in lookup.stored_sifs(keeper.layout, kept.record)]
        flatten(sifs, scratch / "again.sif")
        expected = flat(f"oci:{layout}:one", scratch)
        assert mounted_listing([scratch / "again.sif"], scratch / "again") == expected
