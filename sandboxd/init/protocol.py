"""The Python mirror of ``protocol.h``: what goes to the zygote and to a sandbox's PID 1, and back.

Not for policy: packing, unpacking and the sending of one datagram, nothing else. The layouts are
drawn in ``protocol.h``; ``tests/unit/test_protocol.py`` compiles that header and compares every
number, size and offset with this file.

What comes back from PID 1 is untrusted, as it is one bug away from the sandbox: every length is
checked here; values mean nothing until the caller has looked at them.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

PROTOCOL_VERSION: Final = 1
MSG_MAX: Final = 65536
PAYLOAD_MAX: Final = 4 << 20
MSG_FDS_MAX: Final = 16
EXECS_MAX: Final = 512
CLIENTS_MAX: Final = 8
CGROUP_V1_MAX: Final = 8
HOST_MOUNTS_MAX: Final = 8
HOST_TARGETS_MAX: Final = 4096
PATTERNS_MAX: Final = 64
ENTRY_PATH_MAX: Final = 4096
STATUS_FD: Final = 9


class MsgType(IntEnum):
    Z_INIT = 1
    Z_CLONE = 2
    M_SETUP = 16
    M_ROOT = 17
    M_ATTACH = 18
    M_EXEC = 19
    M_FILE = 20
    M_KILL = 21
    M_PING = 22
    M_SOCKET = 23
    M_FILTER = 24
    M_VIEWS = 25
    Z_READY = 64
    Z_CLONED = 65
    R_DONE = 80
    R_FAILED = 81
    R_STARTED = 82
    R_EXIT = 83
    R_GONE = 84


class ExecFlag(IntEnum):
    # No IntFlag: to put two of those together costs more than to pack the rest of the message.
    EXEC_PAYLOAD_FD = 1 << 0
    EXEC_STDIN = 1 << 1
    EXEC_DETACH = 1 << 2
    EXEC_SHELL = 1 << 3
    EXEC_LOGIN = 1 << 4
    EXEC_CWD_CREATE = 1 << 5
    EXEC_MERGE_STDERR = 1 << 6
    EXEC_TTY = 1 << 7
    EXEC_STATUS = 1 << 8


class RootFlag(IntEnum):
    ROOT_IDLE = 1 << 0
    ROOT_KILL = 1 << 1


class FileOp(IntEnum):
    FILE_READ = 1
    FILE_WRITE = 2
    FILE_STAT = 3
    FILE_LIST = 4
    FILE_MKDIR = 5
    FILE_REMOVE = 6
    FILE_MOVE = 7
    FILE_CHMOD = 8
    FILE_CHOWN = 9
    FILE_PACK = 10
    FILE_UNPACK = 11


class FileFlag(IntFlag):
    FILE_PARENTS = 1 << 0
    FILE_MODE = 1 << 1
    FILE_ENTRY = 1 << 2
    FILE_CHUNKED = 1 << 3
    FILE_FOLLOW = 1 << 4
    FILE_RECURSIVE = 1 << 5
    FILE_REPLACE = 1 << 6
    FILE_OWNERS = 1 << 7
    FILE_SUFFIX = 1 << 8
    FILE_UNREADABLE = 1 << 9


class ArchiveFlaw(IntEnum):
    """Why STEP_ARCHIVE failed, as its index; ``slug`` is its public spelling."""

    ARCHIVE_TRUNCATED = 1
    ARCHIVE_HEADER = 2
    ARCHIVE_NUMBER = 3
    ARCHIVE_NAME = 4
    ARCHIVE_LINK = 5
    ARCHIVE_EXTENSION = 6
    ARCHIVE_TYPE = 7
    ARCHIVE_ENTRIES = 8
    ARCHIVE_SIZE = 9
    ARCHIVE_IN_THE_WAY = 10

    @property
    def slug(self) -> str:
        return self.name.removeprefix("ARCHIVE_").lower().replace("_", "-")


class KillScope(IntEnum):
    KILL_MAIN = 1
    KILL_TREE = 2
    KILL_CHILDREN = 3


class Step(IntEnum):
    """Where a set-up failed; ``slug`` is its public spelling."""

    STEP_NONE = 0
    STEP_MESSAGE = 1
    STEP_CGROUP = 2
    STEP_CGROUP_NS = 3
    STEP_HOSTNAME = 4
    STEP_LOOPBACK = 5
    STEP_PROPAGATION = 6
    STEP_STAGE = 7
    STEP_PROC = 8
    STEP_SYS = 9
    STEP_DEV = 10
    STEP_DEV_NODE = 11
    STEP_DEV_PTS = 12
    STEP_DEV_SHM = 13
    STEP_DEV_MQUEUE = 14
    STEP_SYSCTL = 15
    STEP_MASK = 16
    STEP_READONLY = 17
    STEP_CAPABILITIES = 18
    STEP_SECCOMP = 19
    STEP_ROOT_BUSY = 20
    STEP_ROOT_TARGET = 21
    STEP_ROOT_ATTACH = 22
    STEP_ROOT_MOVE = 23
    STEP_ROOT_PIVOT = 24
    STEP_ROOT_DETACH = 25
    STEP_TABLE_FULL = 26
    STEP_EXEC_CGROUP = 27
    STEP_CLONE = 28
    STEP_OOM_SCORE = 29
    STEP_USER = 30
    STEP_GROUP = 31
    STEP_PIPES = 32
    STEP_STARTED = 33
    STEP_STDIN = 34
    STEP_RLIMIT = 35
    STEP_CREDENTIALS = 36
    STEP_CWD = 37
    STEP_EXEC = 38
    STEP_FILE_OPEN = 39
    STEP_FILE_TYPE = 40
    STEP_FILE_READ = 41
    STEP_FILE_WRITE = 42
    STEP_FILE_RENAME = 43
    STEP_FILE_LENGTH = 44
    STEP_DATA_PIPE = 45
    STEP_FILE_TREE = 46
    STEP_FILE_BOUND = 47
    STEP_FILE_CHANGED = 48
    STEP_ARCHIVE = 49
    STEP_TTY = 50
    STEP_SOCKET = 51
    STEP_VIEW = 52
    STEP_MOUNT_TARGET = 53
    STEP_MOUNT_MOVE = 54
    STEP_COUNT = 55

    @property
    def slug(self) -> str:
        return self.name.removeprefix("STEP_").lower().replace("_", "-")


def step_slug(step: int) -> str:
    """Public name of a step number, also of one that this version does not know."""
    try:
        return Step(step).slug
    except ValueError:
        return f"step-{step}"


def errno_symbol(err: int) -> str:
    """``ENOENT`` for 2; the number itself where it has no name."""
    return errno.errorcode.get(err, str(err))


MSG: Final = struct.Struct("=IIII")
ZYGOTE_INIT: Final = struct.Struct("=IIIIIIQQQ")
ZYGOTE_CLONED: Final = struct.Struct("=ii")
SETUP: Final = struct.Struct("=11I")
EXEC_REQ: Final = struct.Struct("=IIIII")
FILE_REQ: Final = struct.Struct("=IIIIQQQQQqqIIII")
FILE_ENTRY: Final = struct.Struct("=IIIIIIIIQQq")
KILL_REQ: Final = struct.Struct("=II")
SOCKET_REQ: Final = struct.Struct("=I")
FAILURE: Final = struct.Struct("=IIiI")
STARTED: Final = struct.Struct("=II")
EXITED: Final = struct.Struct("=IIiIiIIIQqQQQ")


class ProtocolError(Exception):
    """A datagram that ``protocol.h`` does not allow. Its sender is no longer to be believed."""


@dataclass(frozen=True, slots=True)
class Message:
    type: int
    id: int
    payload: bytes
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    step: int
    index: int
    err: int


@dataclass(frozen=True, slots=True)
class Exited:
    failure: Failure
    status: int
    """As wait4(2) gives it."""
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    user_us: int
    system_us: int
    maxrss_kb: int


# --- what is sent ----------------------------------------------------------------------------


def pack(kind: int, request_id: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """One datagram. Raises ValueError above MSG_MAX."""
    if MSG.size + len(payload) > MSG_MAX:
        raise ValueError(f"payload of {len(payload)} bytes does not fit a message")
    return MSG.pack(kind, request_id, len(payload), flags) + payload


def cstrings(strings: Sequence[str]) -> bytes:
    """NUL-terminated strings, in UTF-8. Raises ValueError for a NUL within or a lone surrogate."""
    if not strings:
        return b""
    # UnicodeEncodeError is a ValueError.
    data = "\0".join(strings).encode() + b"\0"
    if data.count(0) != len(strings):
        raise ValueError("a string holds a NUL byte")
    return data


def exec_payload(
    *,
    user: str,
    cwd: str,
    argv: Sequence[str],
    env: bytes,
    env_count: int,
    nofile: int,
    umask: int = 0o022,
    tty_size: int = 0,
) -> bytes:
    """Payload of M_EXEC. ``env`` is ``env_count`` strings through ``cstrings`` already: it is the
    same for nearly all execs of a sandbox."""
    head = EXEC_REQ.pack(len(argv), env_count, nofile, umask, tty_size)
    return head + cstrings((user, cwd, *argv)) + env


SIZE_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FileFilter:
    """Which entries of a tree an operation is for. Patterns as ``init/glob.c`` has them."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    types: int = (1 << 16) - 1
    """Bits ``1 << (st_mode >> 12)``."""
    size_min: int = 0
    size_max: int = SIZE_MAX
    mtime_min_ns: int = -(1 << 63)
    mtime_max_ns: int = (1 << 63) - 1


EVERYTHING: Final = FileFilter()


def file_payload(
    op: FileOp,
    *,
    user: str,
    path: str | bytes,
    other: str | bytes = b"",
    flags: int = 0,
    mode: int = 0,
    depth: int = 0,
    offset: int = 0,
    length: int = 0,
    entries: int = 0,
    filter: FileFilter = EVERYTHING,
) -> bytes:
    """Payload of M_FILE. Raises ValueError for a NUL within a string."""
    head = FILE_REQ.pack(
        op,
        flags,
        mode,
        depth,
        offset,
        length,
        entries,
        filter.size_min,
        filter.size_max,
        filter.mtime_min_ns,
        filter.mtime_max_ns,
        filter.types,
        len(filter.include),
        len(filter.exclude),
        0,
    )
    words = (user, path, other, *filter.include, *filter.exclude)
    raw = [word if isinstance(word, bytes) else word.encode() for word in words]
    data = b"\0".join(raw) + b"\0"
    if data.count(0) != len(raw):
        raise ValueError("a string holds a NUL byte")
    return head + data


def kill_payload(signal: int, scope: KillScope) -> bytes:
    """Payload of M_KILL."""
    return KILL_REQ.pack(signal, scope)


def socket_payload(family: int) -> bytes:
    """Payload of M_SOCKET; ``family``: AF_INET or AF_INET6."""
    return SOCKET_REQ.pack(family)


def setup_payload(
    *,
    hostname: str,
    sysctls: Iterable[tuple[str, str]],
    masks: Sequence[str],
    readonly: Sequence[str],
    cgroup_v1_count: int,
    shm_mb: int,
    shm_inodes: int,
    dev_inodes: int,
    pty_max: int,
    pending_signals: int,
    memlock_kb: int,
    msgqueue_kb: int,
) -> bytes:
    """Payload of M_SETUP."""
    pairs = [word for pair in sysctls for word in pair]
    head = SETUP.pack(
        cgroup_v1_count,
        shm_mb,
        shm_inodes,
        dev_inodes,
        pty_max,
        pending_signals,
        memlock_kb,
        msgqueue_kb,
        len(pairs) // 2,
        len(masks),
        len(readonly),
    )
    return head + cstrings((hostname, *pairs, *masks, *readonly))


def zygote_init_payload(
    *,
    unmapped_id: int,
    map_count: int,
    program: bytes,
    token: tuple[int, int],
    caps: int,
    map_last: int = 0,
    no_cgroups: bool = False,
) -> bytes:
    """Payload of Z_INIT; ``program`` is an array of struct sock_filter."""
    ids = (unmapped_id, map_count, map_last)
    head = ZYGOTE_INIT.pack(PROTOCOL_VERSION, *ids, len(program), no_cgroups, *token, caps)
    return head + program


# --- what comes back -------------------------------------------------------------------------


def unpack(datagram: bytes) -> Message:
    """The message in a datagram. Raises ProtocolError where its length is not what it says."""
    if len(datagram) < MSG.size:
        raise ProtocolError(f"datagram of {len(datagram)} bytes has no header")
    kind, request_id, length, flags = MSG.unpack_from(datagram)
    if MSG.size + length != len(datagram):
        raise ProtocolError(f"datagram of {len(datagram)} bytes says its payload has {length}")
    return Message(kind, request_id, datagram[MSG.size :], flags)


def _exactly(layout: struct.Struct, payload: bytes) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise ProtocolError(f"payload of {len(payload)} bytes where {layout.size} belong")
    return layout.unpack(payload)


def unpack_failure(payload: bytes) -> Failure:
    step, index, err, _ = _exactly(FAILURE, payload)
    return Failure(step, index, err)


def unpack_started(payload: bytes) -> tuple[int, int]:
    """The command's pid in the sandbox's pid namespace, and the number that names its cgroup."""
    pid, cgroup = _exactly(STARTED, payload)
    return pid, cgroup


def unpack_exited(payload: bytes) -> Exited:
    step, index, err, _, *rest = _exactly(EXITED, payload)
    return Exited(Failure(step, index, err), *rest)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """``struct file_entry`` with what follows it."""

    err: int
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    inode: int
    mtime_ns: int
    path: bytes
    target: bytes


def unpack_entry(data: bytes | bytearray, at: int = 0) -> tuple[FileEntry, int] | None:
    """The entry at ``at`` of what came over a data pipe and where the next one begins; None while
    it is incomplete. Raises ProtocolError where a length cannot be."""
    if len(data) - at < FILE_ENTRY.size:
        return None
    err, mode, uid, gid, nlink, path_len, target_len, _, size, inode, mtime_ns = (
        FILE_ENTRY.unpack_from(data, at)
    )
    if path_len >= ENTRY_PATH_MAX or target_len >= ENTRY_PATH_MAX:
        raise ProtocolError(f"an entry with names of {path_len} and {target_len} bytes")
    names = at + FILE_ENTRY.size
    end = names + path_len + target_len
    if len(data) < end:
        return None
    path = bytes(data[names : names + path_len])
    target = bytes(data[names + path_len : end])
    return FileEntry(err, mode, uid, gid, nlink, size, inode, mtime_ns, path, target), end


def unpack_cloned(payload: bytes) -> tuple[int, int]:
    """``(pid, errno)``."""
    pid, err = _exactly(ZYGOTE_CLONED, payload)
    return pid, err


# --- the socket ------------------------------------------------------------------------------

_FDS_SPACE: Final = socket.CMSG_SPACE(MSG_FDS_MAX * 4)

# As plain numbers: of two members of an IntFlag Python makes a third, at ten times the cost.
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)
_NEWS: Final = ~(_CLOSE_ON_EXEC | int(socket.MSG_EOR))
"""Flags of a received datagram that say something."""


def send(sock: socket.socket, datagram: bytes, fds: Sequence[int] = ()) -> None:
    """Send one datagram and copies of ``fds``. Raises OSError as sendmsg(2) does."""
    if fds:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        sock.sendmsg((datagram,), (rights,), socket.MSG_NOSIGNAL)
    else:
        sock.send(datagram, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One datagram and its fds (close-on-exec, the caller's to close); ``b""`` at the end.

    Raises OSError as recvmsg(2) does, and ProtocolError, with all fds closed, when the datagram or
    its fds did not fit.
    """
    data, ancillary, flags, _ = sock.recvmsg(MSG_MAX, _FDS_SPACE, _CLOSE_ON_EXEC)
    if not ancillary and not flags & _NEWS:
        return data, []
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & _TRUNCATED:
        close_fds(fds)
        raise ProtocolError("datagram or its file descriptors were truncated")
    return data, list(fds)


def close_fds(fds: Iterable[int]) -> None:
    """Close each; one that is already closed does not keep the others open."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
