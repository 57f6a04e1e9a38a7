"""Does a kernel feature work here? Found out by doing it, never by version or uid.

For: gating tests with `@pytest.mark.needs("overlay", "fuse")`. Independent of the product's own
probes on purpose: a bug there must not skip the test that would find it. Each probe leaves nothing
behind and is done once per run; it raises OSError or ProbeFailed with the reason.
"""

from __future__ import annotations

import functools
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.framework import times
from tests.framework.host_state import cgroup_mounts


class ProbeFailed(Exception):
    """The feature does not work; the message says what happened."""


def missing(feature: str) -> str | None:
    """None if `feature` works here, else why not. Raises KeyError for an unknown feature."""
    return _outcome(feature)


@functools.cache
def _outcome(feature: str) -> str | None:
    try:
        PROBES[feature]()
    except (OSError, ProbeFailed, subprocess.SubprocessError) as error:
        return str(error)
    return None


def _unshare(script: str, *flags: str) -> None:
    """Run a shell script in new namespaces, where its mounts die with it."""
    program = shutil.which("unshare")
    if program is None:
        raise ProbeFailed("no unshare (package util-linux)")
    done = subprocess.run(
        [program, *flags, "sh", "-euc", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=times.scaled(20),
    )
    if done.returncode != 0:
        raise ProbeFailed(done.stderr.strip() or f"exit status {done.returncode}")


def _program(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ProbeFailed(f"no {name} (package {package})")
    return path


def _root() -> None:
    """The right to make namespaces and mounts outside a user namespace."""
    _unshare("mount -t tmpfs none /mnt", "--mount")


def _userns() -> None:
    _unshare("test $(id -u) = 0", "--user", "--map-root-user")


def _namespaces() -> None:
    flags = ("--user", "--map-root-user", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts")
    _unshare("mount -t proc proc /proc; ip link set lo up", *flags, "--cgroup")


_CHANGE_LOWER = """
    mkdir lower lower/d upper work merged; echo old > lower/f; touch lower/d/f
    mount -t overlay -o userxattr,lowerdir=lower,upperdir=upper,workdir=work overlay merged
    echo new > merged/f; rm -r merged/d; mkdir merged/d
    test "$(cat lower/f)$(cat merged/f)" = oldnew; test -z "$(ls merged/d)"
"""


def _tmpfs_overlay() -> None:
    """An overlay on tmpfs in a user namespace that really works.

    Below Linux 6.6 tmpfs has no user xattrs: the mount succeeds, and removing a lower directory
    gives EIO. So remove one and make it again.
    """
    script = f"mount -t tmpfs none /mnt; cd /mnt; {_CHANGE_LOWER}"
    _unshare(script, "--user", "--map-root-user", "--mount")


def _overlay() -> None:
    """The same on one of the file systems that a sandbox's writable layer may be."""
    try:
        _tmpfs_overlay()
    except ProbeFailed as on_tmpfs:
        _program("losetup", "mount")
        with tempfile.NamedTemporaryFile(prefix="sandboxd-probe-") as image:
            inner = shlex.quote(f"cd /mnt; {_CHANGE_LOWER}")
            script = f"""
                PATH=$PATH:/usr/sbin; truncate -s 8M {image.name}; mkfs.ext4 -q {image.name}
                mount -o loop {image.name} /mnt
                unshare --user --map-root-user --mount sh -euc {inner}
            """
            try:
                _unshare(script, "--mount")
            except ProbeFailed as on_ext4:
                raise ProbeFailed(f"on tmpfs: {on_tmpfs}; on ext4: {on_ext4}") from None


def _overlay_detached() -> None:
    """Overlayfs takes layers that are attached nowhere, as descriptors (since Linux 6.13)."""
    code = (
        "import ctypes, os\n"
        "def call(*a):\n"
        "    r = ctypes.CDLL(None, use_errno=True).syscall(*a)\n"
        "    assert r >= 0, os.strerror(ctypes.get_errno())\n"
        "    return r\n"
        "fs = call(430, b'tmpfs', 0); call(431, fs, 6, None, None, 0)\n"
        "top = call(432, fs, 0, 0)\n"
        "for name in ('u', 'w', 'l'): os.mkdir(name, dir_fd=top)\n"
        "ov = call(430, b'overlay', 0)\n"
        "for key, name in ((b'lowerdir+', 'l'), (b'upperdir', 'u'), (b'workdir', 'w')):\n"
        "    call(431, ov, 5, key, None, os.open(name, os.O_PATH, dir_fd=top))\n"
        "call(431, ov, 6, None, None, 0)\n"
    )
    flags = ("--user", "--map-root-user", "--mount")
    _unshare(f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}", *flags)


def _fuse() -> None:
    """A squashfs is made, mounted by squashfuse in a private mount namespace, and read."""
    squashfuse = _program("squashfuse_ll", "squashfuse")
    mksquashfs = _program("mksquashfs", "squashfs-tools")
    with tempfile.TemporaryDirectory(prefix="sandboxd-probe-") as scratch:
        content = Path(scratch, "content")
        content.mkdir()
        (content / "file").write_text("read through FUSE")
        # -f keeps squashfuse a child of the shell, which ends it before the namespace goes.
        script = f"""
            {mksquashfs} {content} {scratch}/image -quiet -no-progress >/dev/null
            mkdir {scratch}/mnt
            {squashfuse} -f {scratch}/image {scratch}/mnt & server=$!
            until mountpoint -q {scratch}/mnt; do kill -0 $server; done
            text=$(cat {scratch}/mnt/file)
            umount {scratch}/mnt; wait $server
            test "$text" = "read through FUSE"
        """
        _unshare(script, "--mount")


def _cgroup_v2_kill() -> None:
    """In the cgroup2 hierarchy (beside v1 ones too): make a group, put a child in, kill it."""
    for mount in cgroup_mounts():
        if not (mount / "cgroup.controllers").exists():
            continue
        group = Path(tempfile.mkdtemp(prefix="sandboxd-probe-", dir=mount))
        try:
            with subprocess.Popen(["sleep", "60"]) as child:
                try:
                    (group / "cgroup.procs").write_text(str(child.pid))
                    (group / "cgroup.kill").write_text("1")
                    child.wait(times.scaled(5))
                finally:
                    child.kill()
        finally:
            group.rmdir()
        return
    raise ProbeFailed("no cgroup2 hierarchy is mounted")


def _cgroup_limits() -> None:
    """A group with a memory and a pids limit can be made, in v1 hierarchies or in v2."""
    limits = {"memory.limit_in_bytes": 1 << 26, "memory.max": 1 << 26, "pids.max": 1000}
    found = set()
    for mount in cgroup_mounts():
        try:
            group = Path(tempfile.mkdtemp(prefix="sandboxd-probe-", dir=mount))
        except OSError:
            continue
        try:
            for name, value in limits.items():
                if (group / name).exists():
                    (group / name).write_text(str(value))
                    found.add(name.split(".")[0])
        finally:
            group.rmdir()
    if found != {"memory", "pids"}:
        raise ProbeFailed(f"only {sorted(found) or 'no'} limits can be set")


def _nft() -> None:
    _program("nft", "nftables")
    _unshare("nft add table inet probe; nft list tables | grep -q probe", "--net")


def _veth() -> None:
    _program("ip", "iproute2")
    _unshare("ip link add probe0 type veth peer name probe1; ip link set probe0 up", "--net")


def _loop() -> None:
    losetup = _program("losetup", "mount")
    with tempfile.NamedTemporaryFile(prefix="sandboxd-probe-") as file:
        file.truncate(1 << 20)
        done = subprocess.run(
            [losetup, "--find", "--show", file.name], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ProbeFailed(done.stderr.strip())
        subprocess.run([losetup, "--detach", done.stdout.strip()], check=True)


def _seccomp() -> None:
    """A child can load a filter: PR_SET_NO_NEW_PRIVS, then the strict mode, which needs no BPF."""
    code = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())\n"
        "assert libc.prctl(22, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())\n"
        "libc.syscall(39)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    if done.returncode != -9:  # strict mode kills whoever asks for its pid
        raise ProbeFailed(done.stderr.decode(errors="replace").strip() or "filter has no effect")


def _mmdebstrap() -> None:
    _program("mmdebstrap", "mmdebstrap")


def _busybox() -> None:
    _program("busybox", "busybox-static")


PROBES: dict[str, Callable[[], None]] = {
    "root": _root,
    "userns": _userns,
    "namespaces": _namespaces,
    "overlay": _overlay,
    "overlay-tmpfs": _tmpfs_overlay,
    "overlay-detached": _overlay_detached,
    "fuse": _fuse,
    "cgroup-kill": _cgroup_v2_kill,
    "cgroup-limits": _cgroup_limits,
    "nft": _nft,
    "veth": _veth,
    "loop": _loop,
    "seccomp": _seccomp,
    "mmdebstrap": _mmdebstrap,
    "busybox": _busybox,
}


if __name__ == "__main__":
    for name in PROBES:
        print(f"{name}: {missing(name) or 'works'}")
    sys.exit(any(missing(name) for name in PROBES))
