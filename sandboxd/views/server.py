"""The FUSE side and the launcher's side of the view server.

Messages of the launcher, framed as in ``launcher/protocol.py``; none is answered:

``{"op": "add", "name", "files": ["memory.stat", ...]}``  a sandbox's slot, and its cgroups' files
                                                          (fds, in the order of ``files``)
``{"op": "tell", "name", "cpus", "memory_kb", "disk_kb",  what it was given; until then what reads
  "started_s", "started_at", "quota_us", "cpu_weight",    waits
  "pids"}``
``{"op": "drop", "name"}``                                it is gone
``{"event": "serving"}``, the other way                   once, when the file system answers

No state is kept for an open file: a sandbox can hold millions open. What is read stays in the page
cache for as long as the reading it is from is fresh: a shell that takes a file byte by byte, or a
hundred processes that size themselves, ask us once. The kernel asks for the attributes when their
time is up; a new reading is then taken, and another mtime makes it forget the pages.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import pyfuse3
import trio

from sandboxd.init.protocol import close_fds
from sandboxd.launcher import protocol
from sandboxd.views import cgroup_files, content, figures, tree
from sandboxd.views.content import Clock
from sandboxd.views.pace import Pace
from sandboxd.views.scope import Scope
from sandboxd.views.tree import Node

FRESH_S: Final = 0.1
TELL_TIMEOUT_S: Final = 2.0
"""From a request to the launcher's word on its sandbox, which was sent before."""
KEEP_S: Final = 3600.0
"""Names never change, nor does anything of a directory: the kernel may keep them."""
OF_COMMANDS_MAX: Final = 64
"""Readings kept of a sandbox's files below commands' directories."""
TASKS_MAX: Final = 16_384
"""Requests that wait for their turn, all sandboxes together: 12 KiB each. Above it the kernel keeps
the rest in one line, in which everybody stands behind those who ask too much."""
CPUINFO_FRESH_S: Final = 30.0
"""Reading the host's interrupts every CPU of it."""


@dataclass(slots=True)
class Reading:
    taken_s: float
    changed_ns: int
    """When the text last was another."""
    text: bytes


class View:
    """What the server has of one sandbox."""

    def __init__(self, index: int, name: str, fds: dict[str, int]) -> None:
        self.index = index
        self.name = name
        self.fds = fds
        self.scope: Scope | None = None
        self.told = trio.Event()
        self.clock = Clock()
        self.pace = Pace()
        self.readings: dict[int, Reading] = {}
        self.of_commands: deque[int] = deque()
        """Those of them that are below commands' directories, the oldest first."""

    @property
    def cpus(self) -> Sequence[int]:
        return self.scope.cpus if self.scope is not None else ()

    def close(self) -> None:
        close_fds(self.fds.values())
        self.fds.clear()
        self.told.set()  # who waits is told that there is nothing


class Views(pyfuse3.Operations):
    """The file system. ``cpuinfo_fd`` is the host's /proc/cpuinfo; ``launcher`` does not block."""

    enable_writeback_cache = False

    def __init__(self, cpuinfo_fd: int, launcher: socket.socket) -> None:
        super().__init__()
        self._launcher = launcher
        self._cpuinfo_fd = cpuinfo_fd
        self._cpuinfo_at = -CPUINFO_FRESH_S
        self._cpuinfo = b""
        self._last_index = 0
        self._by_name: dict[str, View] = {}
        self._by_index: dict[int, View] = {}
        self._filtered = lru_cache(maxsize=64)(content.cpuinfo)

    # --- what the launcher says --------------------------------------------------------------

    def listen(self) -> None:
        """Take what it has said so far."""
        while True:
            try:
                message, fds = protocol.receive(self._launcher)
            except BlockingIOError:
                return
            except OSError:
                message, fds = None, []
            if message is None:
                os._exit(0)  # nothing is ours to undo: who made the mount ends it
            self.obey(message, fds)

    def obey(self, message: dict[str, Any], fds: list[int]) -> None:
        """Takes the fds over."""
        name = message["name"]
        if message["op"] == "add":
            self._drop(name)
            self._last_index += 1
            view = View(self._last_index, name, dict(zip(message["files"], fds, strict=True)))
            self._by_name[name] = self._by_index[view.index] = view
            return
        close_fds(fds)
        if message["op"] == "drop":
            self._drop(name)
        elif message["op"] == "tell" and name in self._by_name:
            view = self._by_name[name]
            view.scope = Scope(
                tuple(message["cpus"]),
                message["memory_kb"],
                message["disk_kb"],
                message["started_s"],
                message["started_at"],
                message["quota_us"],
                message["cpu_weight"],
                message["pids"],
            )
            view.told.set()

    def _drop(self, name: str) -> None:
        view = self._by_name.pop(name, None)
        if view is not None:
            del self._by_index[view.index]
            view.close()
            # Or the kernel keeps a dozen names and inodes of every sandbox there ever was.
            pyfuse3.invalidate_entry_async(
                pyfuse3.ROOT_INODE, pyfuse3.FileNameT(name.encode()), ignore_enoent=True
            )

    # --- requests ----------------------------------------------------------------------------

    async def lookup(
        self, parent_inode: Any, name: Any, ctx: Any = None
    ) -> pyfuse3.EntryAttributes:
        del ctx
        text = os.fsdecode(name)
        if parent_inode == tree.ROOT:
            # The launcher's, before it binds a sandbox's: nothing of the sandbox can come here.
            view = await self._added(text)
            return self._attributes(view, Node(0, "", directory=True))
        view = await self._admitted(parent_inode)
        parent = tree.node_at(parent_inode, view.cpus)
        if parent is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        if parent.local:
            await self._told(view)
        node = tree.child(parent, text, view.cpus)
        if node is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(view, node)

    async def getattr(self, inode: Any, ctx: Any = None) -> pyfuse3.EntryAttributes:
        del ctx
        if inode == tree.ROOT:
            return _entry(inode, directory=True)
        view, node = await self._find(inode)
        return self._attributes(view, node)

    async def open(self, inode: Any, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        del ctx
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EROFS)
        await self._find(inode)
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: Any, off: int, size: int) -> bytes:
        view, node = await self._find(fh)
        scope = await self._told(view)
        # Not a new one: it could be longer than the attributes have told.
        reading = view.readings.get(node.local) or self._reading(view, scope, node)
        return reading.text[off : off + size]

    async def opendir(self, inode: Any, ctx: Any) -> Any:
        del ctx
        if inode != tree.ROOT:
            _, node = await self._find(inode)
            if not node.directory:
                raise pyfuse3.FUSEError(errno.ENOTDIR)
        return inode

    async def readdir(self, fh: Any, start_id: int, token: Any) -> None:
        if fh == tree.ROOT:
            return
        view, node = await self._find(fh)
        if node.local:
            await self._told(view)
        listed = tree.children(node, view.cpus)
        for position in range(start_id, len(listed)):
            child = listed[position]
            attributes = self._attributes(view, child)
            name = pyfuse3.FileNameT(child.name.encode())
            if not pyfuse3.readdir_reply(token, name, attributes, position + 1):
                return

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        """Also how the launcher asks whether the server lives."""
        del ctx
        found = pyfuse3.StatvfsData()
        # As a cgroup's: who sizes a buffer by the longest name, or divides by a block, has one.
        found.f_bsize = found.f_frsize = os.sysconf("SC_PAGE_SIZE")
        found.f_namemax = 255
        return found

    # --- behind them -------------------------------------------------------------------------

    async def _admitted(self, inode: int) -> View:
        """The sandbox whose inode it is, once it is its turn."""
        view = self._by_index.get(tree.index_of(inode))
        if view is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        delay_s = view.pace.delay_s(time.monotonic())
        if delay_s > 0:
            await trio.sleep(delay_s)
        return view

    async def _find(self, inode: int) -> tuple[View, Node]:
        view = await self._admitted(inode)
        node = tree.node_at(inode, view.cpus)
        if node is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return view, node

    async def _added(self, name: str) -> View:
        with trio.move_on_after(TELL_TIMEOUT_S):
            while name not in self._by_name:
                self.listen()
                if name not in self._by_name:
                    await trio.sleep(0.01)
        if name not in self._by_name:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._by_name[name]

    async def _told(self, view: View) -> Scope:
        if view.scope is None:
            self.listen()
        if view.scope is None:
            with trio.move_on_after(TELL_TIMEOUT_S):
                await view.told.wait()
        if view.scope is None:
            raise pyfuse3.FUSEError(errno.EIO)
        return view.scope

    def _reading(self, view: View, scope: Scope, node: Node) -> Reading:
        """One that is fresh."""
        now = time.monotonic()
        reading = view.readings.get(node.local)
        if reading is None:
            reading = Reading(now, time.time_ns(), self._text(view, scope, node))
            view.readings[node.local] = reading
            if tree.is_of_command(node):
                view.of_commands.append(node.local)
                if len(view.of_commands) > OF_COMMANDS_MAX:
                    del view.readings[view.of_commands.popleft()]
        elif now - reading.taken_s >= FRESH_S:
            text = self._text(view, scope, node)
            if text != reading.text:
                reading.text, reading.changed_ns = text, time.time_ns()
            reading.taken_s = now
        return reading

    def _text(self, view: View, scope: Scope, node: Node) -> bytes:
        if tree.is_cgroup_file(node):
            return self._cgroup_file(view, scope, node)
        if tree.CPU_DIRECTORY < node.local != tree.CGROUPS:
            return content.cpu_file(node, scope.cpus)
        return self._texts[node.name](self, view, scope)

    def _meminfo(self, view: View, scope: Scope) -> bytes:
        used = figures.memory(view.fds.get("memory.usage"), view.fds.get("memory.stat"))
        return content.meminfo(scope, used)

    def _cgroup_file(self, view: View, scope: Scope, node: Node) -> bytes:
        used = figures.memory(view.fds.get("memory.usage"), view.fds.get("memory.stat"))
        cpu = figures.cpu(view.fds.get("cpu.stat"))
        processes = figures.processes(view.fds.get("pids"))
        return cgroup_files.text(node.name, scope, used, cpu, processes)

    def _stat(self, view: View, scope: Scope) -> bytes:
        processes = figures.processes(view.fds.get("pids"))
        used = figures.cpu(view.fds.get("cpu.stat"))
        return content.stat(scope, view.clock, used, processes, _boottime())

    def _loadavg(self, view: View, scope: Scope) -> bytes:
        processes = figures.processes(view.fds.get("pids"))
        used = figures.cpu(view.fds.get("cpu.stat"))
        return content.loadavg(scope, view.clock, used, processes, _boottime())

    def _uptime(self, view: View, scope: Scope) -> bytes:
        used = figures.cpu(view.fds.get("cpu.stat"))
        return content.uptime(scope, view.clock, used, _boottime())

    def _cpuinfo_of(self, view: View, scope: Scope) -> bytes:
        del view
        if time.monotonic() - self._cpuinfo_at >= CPUINFO_FRESH_S:
            self._cpuinfo = _whole(self._cpuinfo_fd)
            self._cpuinfo_at = time.monotonic()
            self._filtered.cache_clear()
        # One text for all that have the same CPUs: with many CPUs it is large.
        plain = Scope(scope.cpus, 0, 0, 0, 0)
        return self._filtered(plain, self._cpuinfo)

    _texts: Final[dict[str, Callable[[Views, View, Scope], bytes]]] = {
        "meminfo": _meminfo,
        "cpuinfo": _cpuinfo_of,
        "stat": _stat,
        "loadavg": _loadavg,
        "uptime": _uptime,
        "swaps": lambda *_: content.SWAPS,
        "diskstats": lambda *_: b"",
        "cgroups": lambda *_: cgroup_files.PROC_CGROUPS.encode(),
    }

    def _attributes(self, view: View, node: Node) -> pyfuse3.EntryAttributes:
        found = _entry(tree.inode(view.index, node), directory=node.directory)
        if not node.directory:
            found.attr_timeout = 0
            if view.scope is not None:
                reading = self._reading(view, view.scope, node)
                found.st_size = len(reading.text)
                found.st_mtime_ns = found.st_ctime_ns = reading.changed_ns
                found.attr_timeout = max(0.0, reading.taken_s + FRESH_S - time.monotonic())
        return found


def _entry(inode: int, *, directory: bool) -> pyfuse3.EntryAttributes:
    found = pyfuse3.EntryAttributes()
    found.st_ino = pyfuse3.InodeT(inode)
    found.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o555 if directory else stat.S_IFREG | 0o444)
    found.st_nlink = 2 if directory else 1
    found.entry_timeout = found.attr_timeout = KEEP_S
    return found


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _whole(fd: int) -> bytes:
    parts: list[bytes] = []
    while part := os.pread(fd, 1 << 16, sum(map(len, parts))):
        parts.append(part)
    return b"".join(parts)


async def serve(views: Views, launcher: socket.socket) -> None:
    """Serve until the launcher is gone. After ``pyfuse3.init``."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main, 1, TASKS_MAX)
        protocol.send(launcher, {"event": "serving"})
        while True:
            await trio.lowlevel.wait_readable(launcher)
            views.listen()
