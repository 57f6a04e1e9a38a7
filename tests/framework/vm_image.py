"""The virtual machine's disk images: Debian with its 6.1 kernel and systemd, and this repository.

For: `vm`, which boots them. The root is built once and kept below `images.cache_dir()`, keyed by
everything it is made of. The repository goes on a disk of its own at every boot, with its virtual
environment, to be mounted where it lies on the host: so the environment works inside as it is, and
the machine needs no network. Packages come from the sources this machine itself is set up with.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.framework.images import REPOSITORY, cache_dir

SUITE = "bookworm"
"""Debian 12: Linux 6.1, systemd 252, cgroup v2 alone."""
PYTHON = (3, 11)
"""Of that suite: the environment of the host is used inside."""

PACKAGES = (
    "linux-image-cloud-amd64",
    "systemd-sysv",
    "kmod",
    "python3",
    # what scripts/install brings to a node
    "squashfuse",
    "squashfs-tools",
    "squashfs-tools-ng",
    "fuse3",
    "libfuse3-3",
    "uidmap",
    "iproute2",
    "nftables",
    "libseccomp2",
    "e2fsprogs",
    # of the tests
    "busybox-static",
    "gcc",
    "libc6-dev",
    "mount",
    "procps",
)
MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "overlay", "fuse", "loop")
"""Loaded before the root is mounted; the kernel itself asks for whatever else is needed."""

ROOT_SIZE = "64G"
"""Sparse: writable layers reserve what they promise. Nothing in it lasts: each machine writes to a
scratch file of its own."""

_DPKG_OPTIONS = (
    "path-exclude=/usr/share/doc/*",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/locale/*",
)
_SUBIDS = "sandboxd:2000000000:65540"
_AGENT = Path(__file__).with_name("vm_agent.py")
_AGENT_UNIT = """\
[Unit]
Description=Runs what the host asks for
DefaultDependencies=no
After=local-fs.target

[Service]
ExecStart=/usr/bin/python3 /usr/local/lib/vm_agent.py
TasksMax=infinity
KillMode=process
"""
_CUSTOMIZE = (
    # There is no initramfs-tools' initrd: the one made here loads MODULES and no more.
    'rm -rf "$1"/boot/initrd* "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*',
    'chroot "$1" useradd --system --user-group --no-create-home --home-dir /nonexistent '
    "--shell /usr/sbin/nologin sandboxd",
    f'echo {_SUBIDS} | tee "$1/etc/subuid" > "$1/etc/subgid"',
    'echo vm > "$1/etc/hostname"; echo "127.0.0.1 localhost vm" > "$1/etc/hosts"',
    'chroot "$1" systemctl mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer '
    "dpkg-db-backup.timer fstrim.timer systemd-timesyncd.service getty@.service "
    "serial-getty@ttyS0.service e2scrub_reap.service getty-static.service getty.target "
    "systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-random-seed.service "
    "systemd-pstore.service systemd-firstboot.service systemd-machine-id-commit.service",
    'chroot "$1" systemctl set-default multi-user.target',
    'ln -s ../vm-agent.service "$1/etc/systemd/system/multi-user.target.wants/"',
)
_INIT = """\
#!/bin/busybox sh
/bin/busybox mkdir -p /proc /root
/bin/busybox mount -t devtmpfs none /dev
for module in /modules/*.ko; do /bin/busybox insmod "$module"; done
until [ -b /dev/vda ]; do :; done
/bin/busybox mount -t ext4 /dev/vda /root
exec /bin/busybox switch_root /root /sbin/init
"""


class ImageError(Exception):
    """An image could not be made; the message says what to do."""


@dataclass(frozen=True)
class BootImages:
    """What a machine boots from."""

    kernel: Path
    initrd: Path
    root: Path


def boot_images() -> BootImages:
    """The root's images, made now if they are not there; a minute or two then."""
    key = hashlib.sha256()
    recipe = (SUITE, PACKAGES, MODULES, ROOT_SIZE, _DPKG_OPTIONS, _AGENT_UNIT, _CUSTOMIZE, _INIT)
    for part in (repr(recipe).encode(), _AGENT.read_bytes(), _busybox().read_bytes()):
        key.update(part)
    target = cache_dir() / f"vm-{SUITE}-{key.hexdigest()[:16]}"
    if not target.exists():
        # Beside its place, then renamed: complete or absent.
        with tempfile.TemporaryDirectory(prefix=".vm-", dir=target.parent) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            _build(made, Path(scratch, "root"))
            try:
                made.rename(target)
            except OSError:
                if not target.exists():  # another run may have been first
                    raise
    return BootImages(target / "vmlinuz", target / "initrd", target / "root.ext4")


def _build(target: Path, root: Path) -> None:
    hooks = [*_CUSTOMIZE]
    unit = root.parent / "vm-agent.service"
    unit.write_text(_AGENT_UNIT)
    hooks.insert(0, f'install -m 644 {unit} "$1/etc/systemd/system/vm-agent.service"')
    hooks.insert(0, f'install -m 644 {_AGENT} "$1/usr/local/lib/vm_agent.py"')
    _run(
        # Its mounts shall not be the host's, nor stay there if this is killed.
        *("unshare", "--mount", "--propagation", "private"),
        *("mmdebstrap", "--mode=root"),
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
        *(f"--customize-hook={hook}" for hook in hooks),
        SUITE,
        str(root),
    )
    try:
        (modules,) = (root / "usr/lib/modules").iterdir()
        (kernel,) = (root / "boot").glob("vmlinuz-*")
        shutil.copyfile(kernel, target / "vmlinuz")
        _make_initrd(target / "initrd", modules)
        make_disk(root, target / "root.ext4", ROOT_SIZE)
    finally:
        shutil.rmtree(root)


def make_disk(content: Path, image: Path, size: str) -> None:
    """An ext4 image of a directory. No journal: it is thrown away, never recovered."""
    _run("mkfs.ext4", "-q", "-O", "^has_journal", "-d", str(content), str(image), size)


def repository_disk(image: Path) -> None:
    """The working tree with .venv, without what git ignores otherwise or keeps for itself."""
    venv = REPOSITORY / ".venv"
    found = subprocess.run(
        [venv / "bin/python", "-c", "import sys; print(sys._base_executable, *sys.version_info)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if (
        found[0] not in ("/usr/bin/python3", "/usr/bin/python3.11")
        or tuple(map(int, found[1:3])) != PYTHON
    ):
        raise ImageError(
            f".venv is of {found[0]} {found[1]}.{found[2]}; the machine has {SUITE}'s own "
            f"/usr/bin/python3, {PYTHON[0]}.{PYTHON[1]}: run the tests on Debian 12"
        )
    with tempfile.TemporaryDirectory(prefix="sandboxd-test-vm-") as scratch:
        tree = Path(scratch, "tree")
        ignored = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis")
        shutil.copytree(REPOSITORY, tree, symlinks=True, ignore=ignored)
        # Here, where it costs a second; in a fresh clone nothing is compiled yet.
        compile_all = [str(venv / "bin/python"), "-m", "compileall", "-q", "-s", str(tree)]
        _run(*compile_all, "-p", str(REPOSITORY), str(tree / "sandboxd"), str(tree / "sif_tools"))
        # Hard links where they can be: it is large, and only read.
        _run("cp", "-a", "--reflink=auto", str(venv), str(tree / ".venv"))
        make_disk(tree, image, "1G")


def _make_initrd(target: Path, modules: Path) -> None:
    """A cpio archive (newc) that loads MODULES and mounts the root."""
    entries: dict[str, tuple[int, bytes]] = {
        "bin": (0o40755, b""),
        "dev": (0o40755, b""),
        "modules": (0o40755, b""),
        "bin/busybox": (0o100755, _busybox().read_bytes()),
        "init": (0o100755, _INIT.encode()),
    }
    for number, name in enumerate(_load_order(modules)):
        file = modules / name
        entries[f"modules/{number:02}-{file.name}"] = (0o100644, file.read_bytes())
    entries["TRAILER!!!"] = (0, b"")
    archive = bytearray()
    for inode, (name, (mode, data)) in enumerate(entries.items(), start=1):
        nlink, devices = 1, (0, 0, 0, 0)
        fields = (inode, mode, 0, 0, nlink, 0, len(data), *devices, len(name) + 1, 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (name.encode() + b"\0", data):
            archive += part
            archive += bytes(-len(archive) % 4)
    target.write_bytes(gzip.compress(bytes(archive), 1))


def _load_order(modules: Path) -> list[str]:
    """Paths of MODULES and what they need, below `modules`, each after what it needs."""
    needs = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, after = line.partition(":")
        needs[path] = after.split()
    by_name = {Path(path).name.partition(".")[0]: path for path in needs}
    ordered: list[str] = []
    for name in MODULES:
        path = by_name[name]
        # modules.dep lists all that a module needs, what is needed first at the end.
        ordered += [p for p in (*reversed(needs[path]), path) if p not in ordered]
    return ordered


def _busybox() -> Path:
    program = shutil.which("busybox")
    if program is None:
        raise ImageError("no busybox (package busybox-static): scripts/install --with test")
    return Path(program)


def _run(*command: str) -> None:
    if shutil.which(command[0], path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
        raise ImageError(f"no {command[0]}: scripts/install --with vm")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(boot_images(), file=sys.stderr)
