"""The images mounted on this node: one squashfuse each, shared by all sandboxes of that image.

squashfuse parses bytes nobody vouches for. It runs under an id that neither the launcher nor any
sandbox has, without capabilities, with no_new_privs, its own seccomp filter, its own net, ipc and
mount namespace, the latter with nothing but read-only system libraries in it.

Only squashfuse may hold its FUSE descriptor: a forgotten copy turns its death from ENOTCONN, which
everybody survives, into a hang, which nobody does.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from sandboxd.errors import ImageInUse, ImageUnavailable
from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.loop import Loop, Promise, Task
from sandboxd.linux import mount, namespaces, seccomp
from sandboxd.linux.process import (
    set_dumpable,
    set_no_new_privs,
    set_oom_score,
    set_parent_death_signal,
)

MOUNT_TIMEOUT_S: Final = 15.0
CHECK_EVERY_S: Final = 5.0
CHECK_TIMEOUT_S: Final = 10.0
"""A server that has not answered one statfs in this time is killed: its readers cannot be."""

ANSWER_S: Final = 5.0
"""A statfs takes a millisecond, and waits for its turn behind at most one request of each process
that reads."""

_LIBRARY_PATHS: Final = ("/usr", "/lib", "/lib64", "/lib32", "/libx32")


@dataclass(slots=True)
class MountedImage:
    key: str
    name: str
    """Its directory among the mounts: short and without meaning, since sandboxes can see it."""
    ready: Promise[None]
    label: dict[str, str] = field(default_factory=dict)
    """What the daemon calls it; given back to one that starts anew."""
    pid: int = 0
    pidfd: int = -1
    alive_fds: tuple[int, ...] = ()
    """Read ends of two pipes that only the server holds the other ends of."""
    sandboxes: set[str] = field(default_factory=set)


class Images:
    """The table of mounted images, by key."""

    def __init__(
        self,
        loop: Loop,
        *,
        mounter: Lanes,
        prober: Lanes,
        fuse_fd: Callable[[], Task[int]],
        server_path: str,
        server_id: int,
        server_filter: bytes,
        on_death: Callable[[MountedImage], None],
    ) -> None:
        self._loop = loop
        self._mounter = mounter
        self._prober = prober
        self._fuse_fd = fuse_fd
        self._server_path = server_path
        self._server_id = server_id
        self._server_filter = server_filter
        self._on_death = on_death
        self._next_name = 0
        self._checking: MountedImage | None = None
        self.by_key: dict[str, MountedImage] = {}

    def mount(
        self, key: str, sif_fd: int, offset_bytes: int, label: dict[str, str] | None = None
    ) -> Task[MountedImage]:
        """Mount an image, or wait for who is mounting it already. Takes ``sif_fd`` over.

        Raises ImageUnavailable.
        """
        image = self.by_key.get(key)
        if image is not None:
            os.close(sif_fd)
            yield image.ready
            return image
        self._next_name += 1
        image = MountedImage(key, f"i{self._next_name}", Promise(), label or {})
        self.by_key[key] = image
        try:
            yield from self._start(image, sif_fd, offset_bytes)
        except (OSError, TimeoutError) as error:
            self.by_key.pop(key, None)
            if image.pid:
                self.kill(image)
            else:
                self._close_pipes(image)
            self._mounter.request("unmount", lanes=(image.name,), name=image.name)
            refusal = ImageUnavailable(f"the image could not be mounted: {error}")
            image.ready.reject(refusal)
            raise refusal from error
        image.ready.resolve(None)
        return image

    def _start(self, image: MountedImage, sif_fd: int, offset_bytes: int) -> Task[None]:
        fds = [sif_fd]
        try:
            pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
            image.alive_fds = tuple(read for read, _ in pipes)
            fds += [write for _, write in pipes]
            fuse_fd = yield from self._fuse_fd()
            fds.append(fuse_fd)
            reply = self._mounter.request(
                "fuse-mount", (fuse_fd,), lanes=(image.name,), name=image.name
            )
            yield from self._loop.wait(reply, MOUNT_TIMEOUT_S, "mounting the FUSE file system")
            # One pipe on either side of the FUSE fd: whichever way round a kernel closes the
            # descriptors of a dying process (6.18: highest first), one of them ends before it.
            image.pid = self._spawn_server((fds[1], sif_fd, fuse_fd, fds[2]), offset_bytes)
        finally:
            for fd in fds:
                os.close(fd)
        image.pidfd = os.pidfd_open(image.pid)
        self._loop.add_reader(image.pidfd, lambda: self._died(image))
        reply = self._prober.request("fuse-check", lanes=(image.name,), name=image.name)
        yield from self._loop.wait(reply, MOUNT_TIMEOUT_S, "the first answer of squashfuse")

    def mounted(self, key: str) -> MountedImage:
        """An image that files can be read from. Raises ImageUnavailable."""
        image = self.by_key.get(key)
        if image is None or not image.ready.settled or image.ready.error:
            raise ImageUnavailable("the image is not mounted")
        return image

    def are_mounted(self, names: Iterable[str]) -> bool:
        """Whether these, by their names among the mounts, are what is mounted now."""
        return {image.name for image in self.by_key.values()}.issuperset(names)

    def unmount(self, key: str) -> str | None:
        """Unmount an image that no sandbox uses; returns what its name was among the mounts.

        Raises ImageInUse.
        """
        image = self.by_key.get(key)
        if image is None:
            return None
        if image.sandboxes or not image.ready.settled:
            raise ImageInUse(f"{len(image.sandboxes)} sandboxes use the image")
        del self.by_key[key]
        # First the mount, then the server: a server that goes first leaves a mount of errors.
        done = self._mounter.request("unmount", lanes=(image.name,), name=image.name)
        done.watch(lambda: self.kill(image))
        return image.name

    def kill(self, image: MountedImage) -> None:
        with suppress(ProcessLookupError):
            os.kill(image.pid, signal.SIGKILL)

    def watch_servers(self) -> Task[None]:
        """For ever: ask each server in turn for a statfs, and kill one that does not answer."""
        while True:
            yield from self._loop.sleep(CHECK_EVERY_S)
            for image in list(self.by_key.values()):
                if not image.ready.settled or image.key not in self.by_key:
                    continue
                try:
                    reply = self._prober.request("fuse-check", lanes=(image.name,), name=image.name)
                    yield from self._loop.wait(reply, CHECK_TIMEOUT_S, "statfs")
                except TimeoutError:
                    print(f"image {image.name}: its server hangs; killed", file=sys.stderr)
                    self.kill(image)
                except OSError:
                    continue  # it died, and its pidfd tells

    def answer(self, keys: Iterable[str]) -> Task[bool]:
        """Whether the servers of these images answer now. One that does not is left to the watch,
        which gives it longer before it kills it."""
        asked = []
        for key in keys:
            image = self.by_key.get(key)
            if image is None:
                return False
            asked.append(self._prober.request("fuse-check", lanes=(image.name,), name=image.name))
        deadline = time.monotonic() + ANSWER_S
        for reply in asked:
            try:
                yield from self._loop.wait(reply, max(0.0, deadline - time.monotonic()), "statfs")
            except (OSError, TimeoutError):
                return False
        return True

    def suspect(self, image: MountedImage) -> Task[None]:
        """Something that needed this image took too long: kill its server unless it answers now."""
        try:
            reply = self._prober.request("fuse-check", lanes=(image.name,), name=image.name)
            yield from self._loop.wait(reply, CHECK_TIMEOUT_S, "statfs")
        except (OSError, TimeoutError):
            self.kill(image)

    def _died(self, image: MountedImage) -> None:
        self._loop.remove_reader(image.pidfd)
        os.close(image.pidfd)
        image.pidfd = -1
        self._close_pipes(image)
        with suppress(ChildProcessError):
            os.waitpid(image.pid, 0)
        if self.by_key.get(image.key) is image:
            del self.by_key[image.key]
            self._mounter.request("unmount", lanes=(image.name,), name=image.name)
            self._on_death(image)

    @staticmethod
    def _close_pipes(image: MountedImage) -> None:
        for fd in image.alive_fds:
            os.close(fd)
        image.alive_fds = ()

    def _spawn_server(self, fds: tuple[int, int, int, int], offset_bytes: int) -> int:
        """Fork and exec squashfuse. The launcher has no threads, so the child may run Python."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become_server(parent)
            # Low numbers first, so that everything above them can be closed in one go.
            copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 7) for fd in fds]
            for target, source in enumerate(copies, start=3):
                os.dup2(source, target, inheritable=True)
            os.closerange(7, os.sysconf("SC_OPEN_MAX"))
            argv = [
                self._server_path,
                "-f",
                "-o",
                f"ro,offset={offset_bytes}",
                "/proc/self/fd/4",
                "/dev/fd/5",
            ]
            seccomp.load(self._server_filter)
            os.execve(self._server_path, argv, {"PATH": "/usr/bin", "LC_ALL": "C"})
        except BaseException:  # noqa: BLE001 - must not return into the launcher's stack
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(127)

    def _become_server(self, parent: int) -> None:
        # The node's own parts are spared by the OOM killer; what an image can make grow is not.
        # /proc/self belongs to root while a process is not dumpable.
        set_dumpable(True)
        set_oom_score(0)
        set_dumpable(False)
        namespaces.unshare(
            namespaces.CLONE_NEWNS | namespaces.CLONE_NEWNET | namespaces.CLONE_NEWIPC
        )
        _enter_library_root()
        os.setgroups([])
        os.setresgid(self._server_id, self._server_id, self._server_id)
        os.setresuid(self._server_id, self._server_id, self._server_id)
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
