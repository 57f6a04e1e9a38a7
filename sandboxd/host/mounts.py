"""Files of the host for a sandbox: what lies below configured roots, as detached mounts.

The only part of the node that looks at the host's files for a sandbox, and so the one that decides:
what a daemon asks for is a request of somebody who may have been taken over. A source is opened in
one step from its root's descriptor, over no symlink and no magic link, and what is mounted is what
was opened: a name that is changed meanwhile leads nowhere.

A mount is private, never executes setuid bits or device nodes, and shows one file system: what is
mounted below the source is left out, and what lies under it there is seen instead. It is read-only
unless writing was asked for and its root has ``rw``.

Ids. A read-only mount is idmapped by the node's user namespace, where its file system can: the
host's ids 0 to 65535 are the sandbox's, so its root may read all of it, whatever the modes. A
writable one never is: what a sandbox makes there must not be the host root's, a setuid file least
of all. Unmapped, the sandbox's ids are those of its range (``ids.py``), all others show as
``nobody``, and what they own can be read where others may.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sandboxd.linux import mount
from sandboxd.linux.openat2 import RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS
from sandboxd.linux.openat2 import openat2 as open_beneath
from sandboxd.model import MountRoot

_RESOLVE: Final = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
_CANNOT_MAP: Final = {errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP}
"""What mount_setattr(2) says to a file system that takes no idmapped mount."""


@dataclass(frozen=True, slots=True)
class HostMount:
    fd: int
    """The caller's to close; attached nowhere."""
    directory: bool
    mapped: bool


def open_mount(
    roots: Sequence[MountRoot], source: str, *, writable: bool, user_ns: int
) -> HostMount:
    """A mount of ``source``, an absolute path. ``user_ns`` is the node's user namespace.

    Raises OSError: EACCES for what no root allows, ENOENT and ENOTDIR for what is not there, ELOOP
    for a symlink on the way, EINVAL for what is neither a directory nor a file.
    """
    root = _root_of(roots, source)
    if root is None:
        raise _refused(errno.EACCES, "it lies below none of this node's mount_roots")
    if writable and not _may_write(roots, root, source):
        raise _refused(errno.EACCES, "this node allows it to be mounted read-only")
    fd = _open(root, source)
    try:
        kind = os.fstat(fd).st_mode
        if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
            raise _refused(errno.EINVAL, "it is neither a directory nor a regular file")
        flags = mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC | mount.AT_EMPTY_PATH
        tree = mount.open_tree(fd, "", flags)
    finally:
        os.close(fd)
    try:
        attr = mount.MOUNT_ATTR_NOSUID | mount.MOUNT_ATTR_NODEV
        if not writable:
            attr |= mount.MOUNT_ATTR_RDONLY
        # Private: or what the host mounts there later came along.
        mount.mount_setattr(
            tree, "", mount.AT_EMPTY_PATH, attr_set=attr, propagation=mount.MS_PRIVATE
        )
        mapped = not writable and root.mapped and _map_ids(tree, user_ns)
    except BaseException:
        os.close(tree)
        raise
    return HostMount(tree, stat.S_ISDIR(kind), mapped)


def _root_of(roots: Sequence[MountRoot], source: str) -> MountRoot | None:
    """The innermost of those that ``source`` is or lies below."""
    parts = source.split("/")
    if not source.startswith("/") or "\0" in source or {"", ".", ".."} & set(parts[1:]):
        return None
    holding = [root for root in roots if _is_below(source, root.path)]
    return max(holding, key=lambda root: len(root.path), default=None)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _may_write(roots: Sequence[MountRoot], root: MountRoot, source: str) -> bool:
    """Not around another root that is read-only."""
    within = [one for one in roots if _is_below(one.path, source)]
    return root.writable and all(one.writable for one in within)


def _open(root: MountRoot, source: str) -> int:
    # The root's own path is the operator's, and may be a symlink's; opened each time, as it may be
    # mounted after the node has started.
    at = os.open(root.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        below = source[len(root.path.rstrip("/")) :].lstrip("/")
        return open_beneath(at, os.fsencode(below) or b".", os.O_PATH | os.O_NOFOLLOW, _RESOLVE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(errno.ELOOP, "it is a symlink, or leads over one") from None
        raise
    finally:
        os.close(at)


def _map_ids(tree: int, user_ns: int) -> bool:
    try:
        mount.mount_setattr(
            tree, "", mount.AT_EMPTY_PATH, attr_set=mount.MOUNT_ATTR_IDMAP, userns_fd=user_ns
        )
    except OSError as error:
        if error.errno not in _CANNOT_MAP:
            raise
        return False
    return True


def _refused(number: int, why: str) -> OSError:
    return OSError(number, why)
