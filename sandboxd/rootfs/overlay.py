"""A sandbox's root file system: read-only lowers below one size-capped tmpfs.

Made as detached mounts in the node's user namespace, so that the kernel checks the lowers with the
node's ids, and handed to PID 1 as descriptors. Two things hold the mounts of a dead sandbox alive:
the overlay's descriptor and the tmpfs's; whoever closes the last one pays for freeing the pages.

``userxattr`` because the node's namespace may not write trusted.overlay.* attributes; tmpfs has
user attributes since Linux 6.6. Where it has none the writable layer is another file system, which
the host makes (``host.layers``); and where overlayfs takes no detached layers (Linux 6.1 does not)
layers are attached beside the images, and ``make_overlay_of_attached`` makes the same from names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from sandboxd.linux import mount

UPPER: Final = "u"
WORK: Final = "w"


def make_writable_layer(size_bytes: int, inodes: int) -> int:
    """A tmpfs with the empty directories ``UPPER`` and ``WORK``; returns its mount's descriptor.

    Its root, the two directories and the one that overlay makes in ``WORK`` take an inode each. A
    fifth more than asked for is allowed for the attribute that overlay sets on ``UPPER``: tmpfs
    takes attributes out of the same account, in bytes, 1,024 to an inode.
    """
    tmpfs_fd = mount.fs_context(
        "tmpfs",
        {
            "size": str(size_bytes),
            "nr_inodes": str(inodes + 5),
            "mode": "0755",
            "uid": "0",
            "gid": "0",
        },
    )
    try:
        for name, mode in ((UPPER, 0o755), (WORK, 0o700)):
            os.mkdir(name, mode, dir_fd=tmpfs_fd)
            os.chown(name, 0, 0, dir_fd=tmpfs_fd)
    except OSError:
        os.close(tmpfs_fd)
        raise
    return tmpfs_fd


def make_overlay(
    images_fd: int, lowers: Sequence[str], tmpfs_fd: int, layer_fds: Sequence[int] = ()
) -> int:
    """An overlay over frozen layers, then images, each highest first; returns its mount's fd.

    ``layer_fds`` are mounts of ``make_writable_layer``; ``lowers`` are names in the directory
    ``images_fd``. Each name is resolved when it is given to the context, against the working
    directory: relative names are all that the sandbox can then see of them in its mountinfo.
    Changes the caller's working directory.
    """
    with ExitStack() as undo:
        context = mount.fsopen("overlay")
        undo.callback(os.close, context)
        try:
            for layer_fd in layer_fds:
                os.fchdir(layer_fd)
                mount.fsconfig_set_string(context, "lowerdir+", UPPER)
            os.fchdir(images_fd)
            for name in lowers:
                mount.fsconfig_set_string(context, "lowerdir+", name)
            os.fchdir(tmpfs_fd)
            mount.fsconfig_set_string(context, "upperdir", UPPER)
            mount.fsconfig_set_string(context, "workdir", WORK)
            mount.fsconfig_set_flag(context, "userxattr")
            mount.fsconfig_create(context)
            return mount.fsmount(context)
        except OSError as error:
            log = "; ".join(mount.fs_log(context))
            raise OSError(
                error.errno, log or error.strerror, f"overlay: {error.filename}"
            ) from None
        finally:
            os.chdir("/")


def make_overlay_of_attached(
    images_dir: str, lowers: Sequence[str], layer: str, layers: Sequence[str] = ()
) -> int:
    """As ``make_overlay``, of layers that are attached in ``images_dir`` under their names.

    By mount(2), which any kernel takes, with relative names again. Changes the caller's working
    directory.
    """
    names = [*(f"{name}/{UPPER}" for name in layers), *lowers]
    options = f"lowerdir={':'.join(names)},upperdir={layer}/{UPPER},workdir={layer}/{WORK}"
    staged = f"{layer}.root"
    os.chdir(images_dir)
    try:
        os.mkdir(staged, 0o700)
        try:
            mount.mount("overlay", staged, "overlay", 0, f"{options},userxattr")
            try:
                clone = mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC
                return mount.open_tree(mount.AT_FDCWD, staged, clone)
            finally:
                mount.umount2(staged, mount.MNT_DETACH)
        finally:
            os.rmdir(staged)
    finally:
        os.chdir("/")


def make_view(
    images_dir: str,
    lowers: Sequence[str],
    layer_fds: Sequence[int] = (),
    attached: Sequence[str] | None = None,
) -> int:
    """What a stack shows that nobody writes to: a descriptor of its root directory, read only.

    ``attached``: the layers' names, where they are attached. Changes the caller's working
    directory.
    """
    if not layer_fds and len(lowers) == 1:
        return os.open(f"{images_dir}/{lowers[0]}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if attached is not None:
        names = [*(f"{name}/{UPPER}" for name in attached), *lowers]
        staged = f"view{os.getpid()}"
        os.chdir(images_dir)
        try:
            os.mkdir(staged, 0o700)
            try:
                options = f"lowerdir={':'.join(names)},userxattr"
                mount.mount("overlay", staged, "overlay", mount.MS_RDONLY, options)
                try:
                    clone = mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC
                    return mount.open_tree(mount.AT_FDCWD, staged, clone)
                finally:
                    mount.umount2(staged, mount.MNT_DETACH)
            finally:
                os.rmdir(staged)
        finally:
            os.chdir("/")
    with ExitStack() as undo:
        context = mount.fsopen("overlay")
        undo.callback(os.close, context)
        try:
            for layer_fd in layer_fds:
                os.fchdir(layer_fd)
                mount.fsconfig_set_string(context, "lowerdir+", UPPER)
            os.chdir(images_dir)
            for name in lowers:
                mount.fsconfig_set_string(context, "lowerdir+", name)
            mount.fsconfig_set_flag(context, "userxattr")
            mount.fsconfig_create(context)
            return mount.fsmount(context)
        finally:
            os.chdir("/")


def make_root(
    images_fd: int,
    lowers: Sequence[str],
    size_bytes: int,
    inodes: int,
    layer_fds: Sequence[int] = (),
) -> tuple[int, int]:
    """A fresh root: descriptors of the overlay's mount and of the writable layer's."""
    tmpfs_fd = make_writable_layer(size_bytes, inodes)
    try:
        return make_overlay(images_fd, lowers, tmpfs_fd, layer_fds), tmpfs_fd
    except OSError:
        os.close(tmpfs_fd)
        raise
