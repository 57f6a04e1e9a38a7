"""One squashfuse, which serves one image: how it is started, and what it is left with.

It parses bytes nobody vouches for. It runs under an id that neither the launcher nor any sandbox
has, without capabilities, with no_new_privs, its own seccomp filter, its own net, ipc and mount
namespace, the latter with nothing but read-only system libraries in it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.linux import capabilities as cap
from sandboxd.linux import mount, namespaces, seccomp
from sandboxd.linux.process import (
    raise_oom_score,
    set_dumpable,
    set_no_new_privs,
    set_parent_death_signal,
)

PRELOAD: Final = Path(__file__).parent.parent / "init" / "squashfuse_keep.so"
"""Made with the C init, of ``init/preload/squashfuse_keep.c``."""

_XATTR_TABLE: Final = 56
"""In a squashfs' superblock (Documentation/filesystems/squashfs.rst): where the table of extended
attributes begins."""
_NO_TABLE: Final = bytes([0xFF] * 8)
_LIBRARY_PATHS: Final = ("/usr", "/lib", "/lib64", "/lib32", "/libx32")


def open_preload() -> int:
    """PRELOAD; -1 where it was not built, which is said."""
    try:
        return os.open(PRELOAD, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        print(
            f"launcher: no {PRELOAD.name}, so images are slow; scripts/build-init makes it",
            file=sys.stderr,
        )
        return -1


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """What is run, as whom, under which filter."""

    path: str
    preload_fd: int
    """Of PRELOAD, which lets the kernel ask it less; negative without."""
    user_id: int
    seccomp_filter: bytes


def told_of(sif_fd: int, offset_bytes: int) -> dict[str, str]:
    """What the library is told of an image, in the environment."""
    none = os.pread(sif_fd, 8, offset_bytes + _XATTR_TABLE) == _NO_TABLE
    return {"SANDBOXD_NO_XATTRS": "1"} if none else {}


def spawn(program: ServerProgram, fds: tuple[int, int, int, int], offset_bytes: int) -> int:
    """Fork and exec squashfuse; its pid. The launcher has no threads, so the child may run Python.

    ``fds``: of a pipe, the SIF, the FUSE connection and of another pipe, in the order in which the
    child has them.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _become_server(program.user_id, parent)
        preload = program.preload_fd >= 0
        copied = (*fds, program.preload_fd) if preload else fds
        # Low numbers first, so that everything above them can be closed in one go.
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 8) for fd in copied]
        for target, source in enumerate(copies, start=3):
            os.dup2(source, target, inheritable=True)
        os.closerange(3 + len(copies), os.sysconf("SC_OPEN_MAX"))
        argv = [
            program.path,
            "-f",
            "-o",
            f"ro,offset={offset_bytes}",
            "/proc/self/fd/4",
            "/dev/fd/5",
        ]
        seccomp.load(program.seccomp_filter)
        env = {"PATH": "/usr/bin", "LC_ALL": "C"}
        if preload:
            env["LD_PRELOAD"] = "/proc/self/fd/7"
        env |= told_of(4, offset_bytes)
        os.execve(program.path, argv, env)
    except BaseException:  # noqa: BLE001 - must not return into the launcher's stack
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(127)


def _become_server(user_id: int, parent: int) -> None:
    # The node's own parts are spared by the OOM killer; what an image can make grow is not.
    # /proc/self belongs to root while a process is not dumpable.
    set_dumpable(True)
    raise_oom_score(0)
    set_dumpable(False)
    namespaces.unshare(namespaces.CLONE_NEWNS | namespaces.CLONE_NEWNET | namespaces.CLONE_NEWIPC)
    _enter_library_root()
    namespaces.drop_groups()
    if user_id == 0:
        cap.drop_bounding(())  # or the exec would give it all capabilities
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)
    # After the change of ids, which clears it. The capabilities go with the exec: a process
    # that is not root gains none, and there are no ambient ones.
    set_parent_death_signal(signal.SIGKILL, parent)
    set_no_new_privs()


def _enter_library_root() -> None:
    """Swap the root for one with the system's libraries and /proc, both read-only, and no more."""
    mount.mount(None, "/", None, mount.MS_REC | mount.MS_PRIVATE)
    root = mount.fs_context("tmpfs", {"mode": "0755", "size": "64k"})
    trees: list[tuple[str, int]] = []
    links: list[tuple[str, str]] = []
    for path in _LIBRARY_PATHS:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.isdir(path):
            trees.append((path, _read_only_tree(path)))
    trees.append(("/proc", _read_only_tree("/proc")))
    for path, _ in trees:
        os.mkdir(path[1:], 0o755, dir_fd=root)
    for path, target in links:
        os.symlink(target, path[1:], dir_fd=root)
    mount.move_mount(root, "", mount.AT_FDCWD, "/", mount.MOVE_MOUNT_F_EMPTY_PATH)
    os.fchdir(root)
    for path, tree in trees:
        mount.move_mount(tree, "", mount.AT_FDCWD, path[1:], mount.MOVE_MOUNT_F_EMPTY_PATH)
        os.close(tree)
    mount.pivot_root(".", ".")
    mount.umount2(".", mount.MNT_DETACH)
    os.chdir("/")
    os.close(root)


def _read_only_tree(path: str) -> int:
    tree = mount.open_tree(
        mount.AT_FDCWD,
        path,
        mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC | mount.AT_RECURSIVE,
    )
    mount.mount_setattr(
        tree, "", mount.AT_EMPTY_PATH | mount.AT_RECURSIVE, attr_set=mount.MOUNT_ATTR_RDONLY
    )
    return tree
