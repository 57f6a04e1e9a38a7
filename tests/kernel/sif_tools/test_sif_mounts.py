"""Converted images through squashfuse, as a node mounts them: the same tree as the source."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import sif_tools
from tests.framework import times

pytestmark = pytest.mark.needs("fuse")

REPO_ROOT = Path(__file__).resolve().parents[3]

# Everything about a tree that an image keeps, in one text: types, modes, owners, link counts,
# times, targets, and content. A directory's link count is what each file system makes of it.
LISTING = (
    "cd {tree}; find . -mindepth 1 -type d {skip} -printf '%P %m %U %G %Ts\\n' | sort;"
    " find . ! -type d {skip} -printf '%P %y %m %U %G %n %Ts %l\\n' | sort;"
    " find . -type f {skip} -print0 | sort -z | xargs -0 -r sha256sum"
)
GENERATED = (".singularity.d", "singularity", "environment", ".exec", ".run", ".shell", ".test")
MOUNTPOINTS = ("proc", "sys", "dev", "tmp", "run")


def in_mount(sif: Path, script: str, scratch: Path) -> str:
    """Run a shell script with the image mounted at $root, in a mount namespace of its own."""
    part = sif_tools.mountable_partition(sif_tools.read_sif(sif), sif)
    root = scratch / "root"
    root.mkdir()
    server = shutil.which("squashfuse_ll")
    whole = f"""
        root={root}
        {server} -f -o offset={part.offset_bytes} {sif} $root & server=$!
        trap 'umount $root || kill $server; wait $server' EXIT
        until mountpoint -q $root; do kill -0 $server; done
        ( {script} )
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", whole],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=times.scaled(60),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "tool").write_bytes(os.urandom(700_000))
    (root / "usr" / "bin" / "tool").chmod(0o4755)
    os.link(root / "usr" / "bin" / "tool", root / "usr" / "bin" / "alias")
    (root / "bin").symlink_to("usr/bin")
    (root / ("n" * 255)).write_text("long")
    with open(os.fsencode(root) + b"/odd \xff'\"", "wb") as file:
        file.write(b"odd")
    os.mkfifo(root / "pipe")
    for index in range(300):
        (root / "usr" / f"small{index}").write_text(str(index))
    os.utime(root / "usr", (1, 1_500_000_000))
    return root


@pytest.mark.parametrize("compression", list(sif_tools.Compression))
def test_the_mounted_image_is_the_source(
    tree: Path, tmp_path: Path, compression: sif_tools.Compression
) -> None:
    sif = tmp_path / "out.sif"
    options = sif_tools.ConvertOptions(squashfs=sif_tools.SquashfsOptions(compression=compression))
    sif_tools.convert(f"rootfs:{tree}", sif, options)
    skip = " ".join(
        f"-not -path './{name}' -not -path './{name}/*'" for name in (*GENERATED, *MOUNTPOINTS)
    )
    source = subprocess.run(
        ["sh", "-euc", LISTING.format(tree=tree, skip=skip)],
        check=True,
        capture_output=True,
        text=True,
        errors="surrogateescape",
    ).stdout
    assert source.count("\n") > 600
    assert in_mount(sif, LISTING.format(tree="$root", skip=skip), tmp_path) == source


def test_the_mountpoints_are_there(tree: Path, tmp_path: Path) -> None:
    sif = tmp_path / "out.sif"
    sif_tools.convert(f"rootfs:{tree}", sif)
    made = in_mount(sif, "cd $root; stat -c '%n %A' " + " ".join(MOUNTPOINTS), tmp_path)
    assert made.splitlines() == [
        f"{name} {'drwxrwxrwt' if name == 'tmp' else 'drwxr-xr-x'}" for name in MOUNTPOINTS
    ]


@pytest.mark.needs("root")
def test_the_busybox_vector_mounts_and_runs(tmp_path: Path) -> None:
    given = os.environ.get("SIF_VECTORS")
    vectors = Path(given) if given else REPO_ROOT.parent / "shared" / "vectors"
    sif = vectors / "apptainer+apptainer" / "e2e" / "testdata" / "busybox_amd64.sif"
    if not sif.exists():
        pytest.skip(f"no SIF vectors at {vectors} (set SIF_VECTORS)")
    if platform.machine() != "x86_64":
        pytest.skip(f"the vector is made for x86_64, this host is {platform.machine()}")
    assert in_mount(sif, "chroot $root /bin/busybox echo it runs", tmp_path) == "it runs\n"
