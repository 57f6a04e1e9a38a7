"""The worker that makes overlay and FUSE mounts, either of which can block for ever.

A FUSE server that is stopped holds up the mount of an overlay above it; so it is this process that
hangs, not the launcher, and killing the server is the way out; ``lanes`` sees to it that other
images do not wait for that. The prober is a second instance, so that a check of one server does not
stand in the way of a create.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from sandboxd.init.protocol import close_fds
from sandboxd.launcher.worker import Handler
from sandboxd.linux import mount
from sandboxd.rootfs.mount_targets import make_targets
from sandboxd.rootfs.name_server import put_resolv_conf
from sandboxd.rootfs.overlay import make_overlay_of_attached, make_root

CHECK_BYTES: Final = 4096
"""Of the header of a SIF, which is longer."""


def handlers(images_dir: str) -> Callable[[], Mapping[str, Handler]]:
    """The operations, for a worker whose image mounts lie in ``images_dir``."""

    def build() -> Mapping[str, Handler]:
        images_fd = os.open(images_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

        def root(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            made = make_root(
                images_fd,
                request["lowers"],
                request["size_bytes"],
                request["inodes"],
                layer_fds=fds,
            )
            _give_name_server(request, made)
            return {}, made

        def attached_root(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            del fds
            overlay_fd = make_overlay_of_attached(
                images_dir, request["lowers"], request["layer"], request["layers"]
            )
            _give_name_server(request, (overlay_fd,))
            return {}, (overlay_fd,)

        def targets(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            make_targets(fds[0], request["places"])
            return {}, ()

        def fuse_mount(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            (fuse_fd,) = fds
            path = f"{images_dir}/{request['name']}"
            os.mkdir(path, 0o755)
            try:
                mount.mount(
                    "image",
                    path,
                    "fuse.squashfuse",
                    mount.MS_RDONLY | mount.MS_NOSUID | mount.MS_NODEV,
                    # default_permissions: the kernel checks modes; the server would let anyone by
                    f"fd={fuse_fd},rootmode=40000,user_id=0,group_id=0,"
                    "allow_other,default_permissions",
                )
            except OSError:
                os.rmdir(path)
                raise
            return {}, ()

        def attach(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            path = f"{images_dir}/{request['name']}"
            os.mkdir(path, 0o755)
            try:
                mount.move_mount(fds[0], "", mount.AT_FDCWD, path, mount.MOVE_MOUNT_F_EMPTY_PATH)
            except OSError:
                os.rmdir(path)
                raise
            return {}, ()

        def fuse_check(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            del fds
            # statfs is never answered from a cache: the server itself must.
            found = os.statvfs(f"{images_dir}/{request['name']}")
            return {"files": found.f_files}, ()

        def file_check(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            check_file(fds[0], request["was"])
            return {}, ()

        def unmount(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            del fds
            path = f"{images_dir}/{request['name']}"
            with suppress(FileNotFoundError):
                mount.umount2(path, mount.MNT_DETACH)
                os.rmdir(path)
            return {}, ()

        def view_trees(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
            del fds
            made: list[int] = []
            where = os.open(
                request["directory"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=images_fd
            )
            try:
                # By a listing the kernel learns all names in one request, and asks for none below.
                with os.scandir(where) as listing:
                    next(listing, None)
                flags = mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC
                for name in request["names"]:
                    made.append(mount.open_tree(where, name, flags))
            except OSError:
                close_fds(made)
                raise
            finally:
                os.close(where)
            return {}, tuple(made)

        return {
            "view-trees": view_trees,
            "root": root,
            "attached-root": attached_root,
            "targets": targets,
            "fuse-mount": fuse_mount,
            "attach": attach,
            "fuse-check": fuse_check,
            "file-check": file_check,
            "unmount": unmount,
        }

    return build


def check_file(fd: int, was: list[int]) -> None:
    """Read from an image's file as the disk has it, if it is still the one of that size and time of
    change. Raises OSError: ESTALE where it is not."""
    status = os.fstat(fd)
    if [status.st_size, status.st_mtime_ns] != was:
        raise OSError(errno.ESTALE, "the image's file was changed")
    with suppress(OSError):
        # Else what is in memory would be read.
        os.posix_fadvise(fd, 0, CHECK_BYTES, os.POSIX_FADV_DONTNEED)
    if len(os.pread(fd, CHECK_BYTES, 0)) != CHECK_BYTES:
        raise OSError(errno.EIO, "the image's file cannot be read")


def _give_name_server(request: dict[str, Any], made: tuple[int, ...]) -> None:
    """Write what the request has for /etc/resolv.conf; ``made`` is closed where that fails."""
    if request.get("resolv") is None:
        return
    try:
        put_resolv_conf(made[0], request["resolv"])
    except OSError:
        close_fds(made)
        raise
