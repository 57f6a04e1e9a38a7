"""Probes of namespaces and mounts; each in a user and a mount namespace of its own."""

from __future__ import annotations

import array
import base64
import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from sandboxd.linux import _libc, child, ext4, mount, namespaces, process, squashfs

TIMEOUT_S: Final = 15.0
"""What works answers in milliseconds, but not on a node that is overrun: which must start all the
same, and only a kernel that hangs is to be given up on."""
SCRATCH: Final = Path("/tmp")
"""Where a probe mounts, in its own mount namespace: any directory that exists everywhere."""

MapIds = Callable[[int], None]

NODE: Final = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS

# A squashfs with zstd-compressed metadata, made with `mksquashfs content image -comp zstd -nopad
# -all-root -no-xattrs -no-exports -mkfs-time 0 -all-time 0` from: file, directory/file.
_SQUASHFS: Final = base64.b64decode(
    "aHNxcwQAAAAAAAAAAAACAAEAAAAGABEAQAIBAAQAAABgAAAAAAAAABMBAAAAAAAACwEAAAAAAAD//////////3gAAAAA"
    "AAAAuAAAAAAAAAD9AAAAAAAAAP//////////bG93ZXIKcmVhZCB0aHJvdWdoIEZVU0UKPgAotS/9IICtAQBCggcP4C0G"
    "ABMAUJXSeYns7p0CP33nmPzzIww7/HUMegQIAK8hbndfOzYEHpcyAmQHSOwCLTEAKLUv/SBBRQEAyAACAwBmaWxlAQAg"
    "CABkaXJlY3RvcnlAAAIGAEyVgjtggzv4LSwDQhCAYAAAAAAAAAAYAAABAAAAAOsAAAAAAAAABIAAAAAABQEAAAAAAAA="
)
_FILE_TEXT: Final = b"read through FUSE\n"


def user_namespaces(map_ids: MapIds, nested_count: int) -> None:
    """A user namespace with many ids, and in it another with the first ``nested_count``.

    The inner one must be able to take its last id and to set its groups: apt needs both. With a
    ``nested_count`` of 1 neither is asked for: a map of one's own id has given up setgroups(2).
    """
    one_id = nested_count == 1

    def take_last_id() -> None:
        last = nested_count - 1
        if not one_id:
            os.setgroups([last])
        os.setresgid(last, last, last)
        os.setresuid(last, last, last)

    def nest() -> None:
        child.run(take_last_id, TIMEOUT_S, namespaces.CLONE_NEWUSER, map_inner)

    def map_inner(pid: int) -> None:
        ids = [(0, 0, nested_count)]
        namespaces.write_id_map(pid, ids, ids, setgroups=not one_id)

    child.run(nest, TIMEOUT_S, NODE, map_ids)


def overlay(map_ids: MapIds, detached: bool) -> None:
    """An overlay on tmpfs with userxattr in a user namespace: copy up, white out, make opaque.

    On Linux 6.1 tmpfs has no user xattrs: the mount succeeds, and only removing a directory that
    comes from the lower layer fails (EIO). ``detached``: with the upper layer on a tmpfs attached
    nowhere, and ``lowerdir+``.
    """

    def work() -> None:
        _tmpfs_scratch()
        _make_lower()
        if detached:
            _change_lower_files(_detached_overlay(SCRATCH / "lower"))
        else:
            _change_lower_files(_attached_overlay())

    child.run(work, TIMEOUT_S, NODE, map_ids)


def overlay_on_ext4(map_ids: MapIds, owner: int, directory: str) -> None:
    """The same with the upper layer on an ext4 that the host's root makes in ``directory``.

    ``owner``: the host's id of the user namespace's root.
    """
    fd = ext4.mount_copy(ext4.make_template(1 << 20, 16), directory)

    def work() -> None:
        _tmpfs_scratch()
        os.chdir(SCRATCH)
        _make_lower()
        os.mkdir("layer")
        mount.move_mount(fd, "", mount.AT_FDCWD, "layer", mount.MOVE_MOUNT_F_EMPTY_PATH)
        _change_lower_files(_attached_overlay("layer/"))

    try:
        for name in ("upper", "work"):
            os.mkdir(name, dir_fd=fd)
            os.chown(name, owner, owner, dir_fd=fd)
        child.run(work, TIMEOUT_S, NODE, map_ids)
    finally:
        os.close(fd)


def fuse(map_ids: MapIds) -> None:
    """A FUSE mount in a user namespace, and the kernel's FUSE_INIT answered."""

    def work(theirs: socket.socket) -> None:
        _tmpfs_scratch()
        fuse_fd = _receive_fd(theirs)
        _mount_fuse(fuse_fd, SCRATCH)
        _answer_init(fuse_fd)

    _with_fuse_fd(work, map_ids)


def squashfuse(map_ids: MapIds, program: Path) -> None:
    """``program`` serves a small zstd squashfs; it is read, and an overlay made on top of it."""

    def work(theirs: socket.socket) -> None:
        _tmpfs_scratch()
        target = SCRATCH / "lower"
        target.mkdir()
        fuse_fd = _receive_fd(theirs)
        _mount_fuse(fuse_fd, target)
        image_fd = os.memfd_create("squashfs")
        os.write(image_fd, _SQUASHFS)
        with _server(program, image_fd, fuse_fd) as server:
            # Only the server may hold the connection, or its death is a hang and not ENOTCONN.
            os.close(fuse_fd)
            try:
                text = (target / "file").read_bytes()
            except OSError as error:
                server.kill()
                said = (server.communicate()[1] or b"").decode(errors="replace").strip()
                raise OSError(error.errno, f"{error.strerror} ({said})", str(program)) from None
            if text != _FILE_TEXT:
                raise _libc.oserror(errno.EIO, f"{program} served {text!r}")
            _read_through_overlay()
            os.chdir("/")

    _with_fuse_fd(work, map_ids)


def kernel_squashfs(map_ids: MapIds) -> None:
    """The kernel mounts the same squashfs from a loop device, idmapped; it is read in the user
    namespace, where it is root's, and an overlay made on top of it."""

    def work(theirs: socket.socket) -> None:
        _tmpfs_scratch()
        tree = _receive_fd(theirs)
        target = SCRATCH / "lower"
        target.mkdir()
        mount.move_mount(tree, "", mount.AT_FDCWD, target, mount.MOVE_MOUNT_F_EMPTY_PATH)
        os.close(tree)
        owner = (target / "file").stat().st_uid
        if (target / "file").read_bytes() != _FILE_TEXT or owner != 0:
            raise _libc.oserror(errno.EIO, f"another file, or of owner {owner}")
        _read_through_overlay()

    ours, theirs = socket.socketpair()
    with ours, theirs, child.running(lambda: work(theirs), NODE, map_ids) as inner:
        user_ns = namespaces.open_namespace(inner.pid, "user")
        image_fd = os.memfd_create("squashfs", os.MFD_CLOEXEC)
        try:
            os.write(image_fd, _SQUASHFS.ljust(squashfs.BLOCK_BYTES, b"\0"))
            tree = squashfs.mount_idmapped(image_fd, 0, user_ns)
            try:
                socket.send_fds(ours, [b"f"], [tree])
            finally:
                os.close(tree)
        finally:
            os.close(image_fd)
            os.close(user_ns)
        inner.result(TIMEOUT_S)


def proc_visible(map_ids: MapIds) -> None:
    """A new /proc and /sys can be mounted in new namespaces.

    The kernel refuses (EPERM) where the ones the node has are partly covered, as in a container.
    """
    flags = namespaces.CLONE_NEWPID | namespaces.CLONE_NEWNET | namespaces.CLONE_NEWIPC

    def mount_them() -> None:
        for fstype in ("proc", "sysfs", "mqueue"):
            os.close(mount.fs_context(fstype, {}))

    def work() -> None:
        namespaces.unshare(flags)  # the pid namespace is that of the next child
        child.run(mount_them, TIMEOUT_S)

    child.run(work, TIMEOUT_S, NODE, map_ids)


def _tmpfs_scratch() -> None:
    mount.mount("tmpfs", SCRATCH, "tmpfs", mount.MS_NOSUID | mount.MS_NODEV, "size=1m,mode=755")


def _make_lower() -> None:
    (SCRATCH / "lower/directory").mkdir(parents=True)
    (SCRATCH / "lower/file").write_bytes(_FILE_TEXT)
    (SCRATCH / "lower/directory/file").write_bytes(b"lower\n")


def _attached_overlay(layer: str = "") -> int:
    """With upper and work directory below ``layer``, which has them if it is another mount."""
    os.chdir(SCRATCH)
    for name in ("merged",) if layer else ("upper", "work", "merged"):
        os.mkdir(name)
    options = f"lowerdir=lower,upperdir={layer}upper,workdir={layer}work,userxattr"
    mount.mount("overlay", "merged", "overlay", 0, options)
    return os.open("merged", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _read_through_overlay() -> None:
    """What a lower that is a FUSE mount must do, without asking what the upper can."""
    merged_fd = _attached_overlay()
    try:
        with open(os.open("file", os.O_RDONLY, dir_fd=merged_fd), "rb") as file:
            if file.read() != _FILE_TEXT:
                raise _libc.oserror(errno.EIO, "overlay shows another file")
    finally:
        os.close(merged_fd)


def _detached_overlay(lower: Path) -> int:
    tmpfs_fd = mount.fs_context("tmpfs", {"size": "1m", "mode": "755"})
    try:
        for name in ("upper", "work"):
            os.mkdir(name, dir_fd=tmpfs_fd)
        layers = f"/proc/self/fd/{tmpfs_fd}"
        return mount.fs_context(
            "overlay",
            [
                ("lowerdir+", str(lower)),
                ("upperdir", f"{layers}/upper"),
                ("workdir", f"{layers}/work"),
                ("userxattr", None),
            ],
        )
    finally:
        os.close(tmpfs_fd)


def _change_lower_files(merged_fd: int) -> None:
    """Modify ``file``; remove ``directory`` with what is in it and make it again, empty."""
    os.fchdir(merged_fd)
    os.close(merged_fd)
    with open("file", "ab") as file:
        file.write(b"more")
    os.unlink("directory/file")
    os.rmdir("directory")
    os.mkdir("directory")
    if Path("file").read_bytes() != _FILE_TEXT + b"more" or os.listdir("directory"):
        raise _libc.oserror(errno.EIO, "overlay shows removed or old files")


def _with_fuse_fd(work: Callable[[socket.socket], None], map_ids: MapIds) -> None:
    """Run ``work`` in a user namespace, and send it a /dev/fuse that was opened inside of that.

    The open is ours, through setns: the node may be for root only (0600), and a descriptor opened
    outside of the user namespace gives EINVAL at mount.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, child.running(lambda: work(theirs), NODE, map_ids) as inner:

        def open_inside() -> None:
            userns_fd = namespaces.open_namespace(inner.pid, "user")
            namespaces.setns(userns_fd, namespaces.CLONE_NEWUSER)
            fuse_fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
            ours.sendmsg(
                [b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fuse_fd]))]
            )

        child.run(open_inside, TIMEOUT_S)
        inner.result(TIMEOUT_S)


def _receive_fd(sock: socket.socket) -> int:
    sock.settimeout(TIMEOUT_S)
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if not fds:
        raise _libc.oserror(errno.EBADF, "no descriptor was sent")
    os.set_inheritable(fds[0], False)
    return fds[0]


def _mount_fuse(fuse_fd: int, target: Path) -> None:
    options = f"fd={fuse_fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    flags = mount.MS_RDONLY | mount.MS_NOSUID | mount.MS_NODEV
    mount.mount("probe", target, "fuse.probe", flags, options)


# <linux/fuse.h>: fuse_in_header, fuse_init_in, fuse_out_header, fuse_init_out (since 7.23)
FUSE_IN_HEADER: Final = struct.Struct("=IIQQIIIHH")
FUSE_INIT_IN: Final = struct.Struct("=IIII")
FUSE_OUT_HEADER: Final = struct.Struct("=IiQ")
FUSE_INIT_OUT: Final = struct.Struct("=IIIIHHIIHHI28x")
FUSE_INIT: Final = 26
FUSE_KERNEL_VERSION: Final = 7
FUSE_MINOR: Final = 31
FUSE_READ_MIN_BYTES: Final = 8192


def _answer_init(fuse_fd: int) -> None:
    """The kernel sends FUSE_INIT right at mount, and takes an answer of the right size only."""
    request = os.read(fuse_fd, FUSE_READ_MIN_BYTES + 65536)
    _, opcode, unique, *_ = FUSE_IN_HEADER.unpack_from(request)
    major, _, readahead, _ = FUSE_INIT_IN.unpack_from(request, FUSE_IN_HEADER.size)
    if opcode != FUSE_INIT or major != FUSE_KERNEL_VERSION:
        raise _libc.oserror(errno.EPROTO, f"FUSE request {opcode}, protocol {major}")
    body = FUSE_INIT_OUT.pack(major, FUSE_MINOR, readahead, 0, 1, 1, 4096, 1, 0, 0, 0)
    size = FUSE_OUT_HEADER.size + len(body)
    os.write(fuse_fd, FUSE_OUT_HEADER.pack(size, 0, unique) + body)


@contextlib.contextmanager
def _server(program: Path, image_fd: int, fuse_fd: int) -> Iterator[subprocess.Popen[bytes]]:
    parent_pid = os.getpid()
    command = [str(program), "-f", "-o", "ro", f"/proc/self/fd/{image_fd}", f"/dev/fd/{fuse_fd}"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(image_fd, fuse_fd),
        # The probe may be killed at its deadline; the server must not outlive it.
        preexec_fn=lambda: process.set_parent_death_signal(  # noqa: PLW1509 - one thread here
            signal.SIGKILL, parent_pid
        ),
    ) as server:
        try:
            yield server
        finally:
            server.kill()
