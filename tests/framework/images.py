"""Images for tests, small and made once.

For: e2e and security tests. Everything is cached below `$XDG_CACHE_HOME/sandboxd-tests` (default
`~/.cache`), keyed by what it is made of; files there are complete or absent, so that two runs at
once do no harm. Conversion goes through the `sif-tools` command, as a user's would.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
PASSWD += "agent:x:1000:1000:agent:/home/agent:/bin/sh\n"
GROUP = "root:x:0:\nnogroup:x:65534:\nagent:x:1000:\n"
SMALL_DEBIAN_PACKAGES = ("python3-minimal", "procps")


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base, "sandboxd-tests")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def busybox_image() -> Path:
    """A static busybox with every applet linked, users root, agent (1000) and nobody: 1 MB."""
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("no busybox (package busybox-static)")
    key = hashlib.sha256(Path(program).read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    target = cache_dir() / f"busybox-{key}.sif"
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="sandboxd-test-image-") as scratch:
            make_busybox_rootfs(Path(program), Path(scratch, "rootfs"))
            convert(f"rootfs:{scratch}/rootfs", target)
    return target


def make_busybox_rootfs(program: Path, rootfs: Path) -> None:
    """A directory that is what the image is made of."""
    for name in ("bin", "etc", "proc", "sys", "dev", "root", "home/agent", "usr/bin", "var"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "tmp").mkdir()
    (rootfs / "tmp").chmod(0o1777)
    (rootfs / "work").mkdir()
    shutil.copyfile(program, rootfs / "bin/busybox")
    (rootfs / "bin/busybox").chmod(0o755)
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True)
    for applet in applets.stdout.split():
        if applet != "busybox":
            (rootfs / "bin" / applet).symlink_to("busybox")
    (rootfs / "etc/passwd").write_text(PASSWD)
    (rootfs / "etc/group").write_text(GROUP)
    for path in (rootfs, *rootfs.rglob("*")):
        os.chown(path, 0, 0, follow_symlinks=False)
    for path in (rootfs / "home/agent", rootfs / "work"):
        os.chown(path, 1000, 1000)


def debian_image(packages: tuple[str, ...] = SMALL_DEBIAN_PACKAGES) -> Path:
    """A minimal Debian with `packages`, from the machine's own package sources."""
    recipe = REPOSITORY / "scripts/make-task-image"
    key = hashlib.sha256(recipe.read_bytes() + " ".join(packages).encode()).hexdigest()[:16]
    target = cache_dir() / f"debian-{key}.sif"
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="sandboxd-test-image-") as scratch:
            _run([str(recipe), "--packages", ",".join(packages), f"{scratch}/oci"])
            convert(f"oci:{scratch}/oci", target)
    return target


def task_image() -> Path:
    """The quickstart's default image: Debian with Python, git and pytest."""
    recipe = REPOSITORY / "scripts/make-task-image"
    key = hashlib.sha256(recipe.read_bytes()).hexdigest()[:16]
    target = cache_dir() / f"task-{key}.sif"
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="sandboxd-test-image-") as scratch:
            _run([str(recipe), f"{scratch}/oci"])
            convert(f"oci:{scratch}/oci", target)
    return target


def vectors_dir() -> Path:
    """Real SIF files made by other tools: `$SIF_VECTORS`, or beside the clone."""
    directory = Path(os.environ.get("SIF_VECTORS") or REPOSITORY.parent / "shared/vectors")
    if not directory.is_dir():
        pytest.skip(f"no SIF vectors at {directory} (set SIF_VECTORS)")
    return directory


def busybox_vector() -> Path:
    """A real, signed build of busybox for amd64 by Apptainer."""
    return vectors_dir() / "apptainer+apptainer/e2e/testdata/busybox_amd64.sif"


def convert(source: str, target: Path) -> Path:
    """`sif-tools convert`, into a file of its own that then takes its place.

    As a module, since a checkout need not be installed."""
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        _run([sys.executable, "-m", "sif_tools", "convert", source, str(made)])
        made.replace(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
