"""The view server's start: from hostd's root to a process that is nothing, anywhere.

fd 3: the launcher, 4: the node's user namespace, 5: its mount namespace; the argument: the
directory to mount at, which the launcher has made. Order of steps:

  1. into the user namespace; there ``/dev/fuse`` is opened, which belongs to the namespace it was
     opened in and whose node may be root's alone. Nobody else ever has this descriptor: a copy
     would turn the server's death from ENOTCONN, which everybody survives, into a hang;
  2. into the mount namespace, and the mount: read-only, as the node's own id;
  3. an empty root, in namespaces of its own; the id that serves files, no capabilities, no new
     privileges, its filter;
  4. the first answer.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import pyfuse3
import trio

from sandboxd.linux import capabilities as cap
from sandboxd.linux import mount, namespaces, seccomp
from sandboxd.linux.process import set_dumpable, set_no_new_privs, set_parent_death_signal
from sandboxd.log_lines import fold_stderr
from sandboxd.views.server import Views, serve

LAUNCHER, USERNS, MNTNS = 3, 4, 5


def main() -> None:
    fold_stderr("view server")
    path, node_id, server_id = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    parent = os.getppid()
    program = seccomp.compile_profile(seccomp.VIEW_SERVER_PROFILE)
    launcher = socket.socket(fileno=LAUNCHER)
    launcher.set_inheritable(False)
    launcher.setblocking(False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    fuse = _mount(path, node_id)
    cpuinfo = os.open("/proc/cpuinfo", os.O_RDONLY | os.O_CLOEXEC)
    _become_nobody(server_id, parent)
    views = Views(cpuinfo, launcher)
    pyfuse3.init(views, f"/dev/fd/{fuse}", {"default_permissions"})
    trio.run(_confined, views, launcher, program)


def _mount(path: str, node_id: int) -> int:
    namespaces.setns(USERNS, namespaces.CLONE_NEWUSER)
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    namespaces.setns(MNTNS, namespaces.CLONE_NEWNS)
    os.close(USERNS)
    os.close(MNTNS)
    cap.set_securebits(cap.SECBIT_NO_SETUID_FIXUP)
    namespaces.drop_groups()
    os.setresgid(node_id, node_id, node_id)
    os.setresuid(node_id, node_id, node_id)
    mount.mount(
        "views",
        path,
        "fuse.views",
        mount.MS_RDONLY | mount.MS_NOSUID | mount.MS_NODEV | mount.MS_NOEXEC,
        f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
    )
    return fuse


def _become_nobody(server_id: int, parent: int) -> None:
    cap.drop_bounding(())  # while there is a /proc that says how many there are
    namespaces.unshare(namespaces.CLONE_NEWNS | namespaces.CLONE_NEWNET | namespaces.CLONE_NEWIPC)
    mount.mount(None, "/", None, mount.MS_REC | mount.MS_PRIVATE)
    root = mount.fs_context("tmpfs", {"mode": "0555", "size": "4k"}, mount.MOUNT_ATTR_RDONLY)
    mount.move_mount(root, "", mount.AT_FDCWD, "/", mount.MOVE_MOUNT_F_EMPTY_PATH)
    os.fchdir(root)
    os.close(root)
    mount.pivot_root(".", ".")
    mount.umount2(".", mount.MNT_DETACH)
    os.chdir("/")
    os.setresgid(server_id, server_id, server_id)
    os.setresuid(server_id, server_id, server_id)
    cap.capset(0, 0, 0)
    set_dumpable(False)
    set_parent_death_signal(signal.SIGKILL, parent)
    set_no_new_privs()


async def _confined(views: Views, launcher: socket.socket, program: bytes) -> None:
    """In the running loop: what trio opens for itself it has by now."""
    seccomp.load(program)
    await serve(views, launcher)


if __name__ == "__main__":
    main()
