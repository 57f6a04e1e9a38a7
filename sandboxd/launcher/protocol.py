"""What the daemon says to the launcher, and back.

One SOCK_SEQPACKET datagram is one JSON object; file descriptors come beside it (SCM_RIGHTS). The
socket is the launcher's listening Unix socket, owned by the daemon's user, mode 0600.

Request:  ``{"id": 7, "verb": "create", ...}``
Answer:   ``{"id": 7, "ok": {...}}`` or
          ``{"id": 7, "error": {"code": ..., "message": ..., "hint": ..., "detail": {...}}}`` where
          ``code`` is that of a class in ``sandboxd.errors``, ``detail`` its further fields
Event:    ``{"event": "sandbox-died", ...}``, to every connection, whenever it happens

========== ====================================================== =================================
verb       request                                                answer (fds)
========== ====================================================== =================================
hello      ``version``                                            ``version init boot_id
                                                                  started_at``
node       -                                                      ``features limits counts …``
mount      ``key name digest sif_offset`` (fd: the SIF)           ``key`` when files can be read
unmount    ``key``                                                ``key``; error ``image-in-use``
images     -                                                      ``images: [{key name digest pid
                                                                  users}]``
create     ``sandbox images:[key, ...] limits hostname meta       ``sandbox pid phases
           copy_from: {sandbox paths}`` (base64, relative to the  oom_kill_path`` (fd: control)
           root; or null: ``transfers.py``)
           (fd: none, or a seccomp program of its own)            and ``mapped``, of each mount
           mounts: [{source target read_only}, ...]
attach     ``sandbox``                                            ``sandbox oom_kill_path``
                                                                  (fd: control)
list       ``after`` (a sandbox id, or "")                        ``sandboxes more``
state      ``sandbox``                                            ``state reason``, as in ``list``
delete     ``sandbox``                                            ``sandbox`` when no process lives
note       ``sandbox meta``                                       -
keep       ``name record`` (an object; null: no more)             -
kept       ``after`` (a name, or "")                              ``kept: [[name, record]] more``
freeze     ``sandbox frozen`` (a boolean)                         ``execs`` once all are frozen
kill-exec  ``sandbox cgroup`` (of ``R_STARTED``)                  -
probe      ``sandbox``                                            ``answer``: whether its images'
                                                                  servers do, asked now
exclusive  ``sandbox how``, see ``exclusive.py``                  ``execs`` once it is so
usage      ``sandbox``                                            figures, see ``usage.py``
diff       ``sandbox`` or ``snapshot``; ``since form after        ``entries more`` once all of it
           limit most`` (fd: the write end of a pipe)             is written, see ``diffs.py``
egress     ``sandbox after limit``                                see ``sandboxd.network.egress``
process-…  see below
========== ====================================================== =================================

``sandbox`` is the id the daemon chose; creating one that exists is an error ``sandbox-exists``,
deleting one that does not is not. ``images`` are keys of mounted images, lowest layer first.
``meta`` is the daemon's own blob (a JSON object of at most 16 KiB), given back by ``list``, so that
a restarted daemon has everything again; ``note`` replaces it. ``phases`` are milliseconds by name.
``keep`` and ``kept`` are the same for what is no sandbox's (``kept.py``).
``oom_kill_path`` is a file the daemon's user may read and that has a line ``oom_kill N``
(``memory.events`` of the sandbox's cgroup, or v1's ``memory.oom_control``); "" where there is none.
``limits`` of ``node`` says by limit name how it is held (``model.Enforcement``).

``version`` is that of this protocol and the same on both sides, or nothing else is answered;
``init`` is the fingerprint of ``protocol.h``, which the daemon speaks over the control fds.

With the control fd come the read ends of two pipes for each image: one at its end says that the
image's server is dead (``runtime/image_watch.py``).

``create`` of a sandbox with a network has ``network`` too: what ``launcher/network.py`` attaches.

Background processes, which outlive a daemon (``processes.py``); all take ``sandbox`` and, but for
``process-list``, ``process``, the id the daemon chose:

=================== ============================================= =================================
process-start       ``meta flags capacity most`` (fd: the         a row, or ``failure: [step,
                    payload of M_EXEC)                            index, errno]`` (fds: as attach)
process-list        ``after`` (a process id, or "")               ``processes more``
process-attach      -                                             - (fds: see ``Processes.attach``)
process-signal      ``signal scope`` (of ``enum kill_scope``)     - once it is sent
process-close-stdin -                                             -
process-remove      -                                             - when none of its tree lives
=================== ============================================= =================================

A row: ``process pid flags spool meta started_at exit``; ``exit`` is null while it runs, then
``at oom`` with ``status failure user_us system_us maxrss_kb`` of R_EXIT, or with ``lost`` (why PID
1 is gone). ``capacity`` is that of each spool in bytes (``spool.py``); 0 gives the pipes
themselves. ``most`` is how many processes the sandbox may have.

The control fd is a socket to the sandbox's PID 1 and speaks ``sandboxd/init/protocol.h``: execs and
file operations go straight there; the launcher is only in the way of creating and deleting.

What is asked for by a daemon that is gone when it is done is undone (a sandbox, a process, a
snapshot); a mount stays, and ``image-mounted {key name digest}`` tells whoever is there by then.

Events: ``sandbox-died {sandbox reason}`` (reason: ``exited``, ``oom-killed``, ``image-lost``,
``node-lost``), ``image-died {key}``, and ``process-exited {sandbox process exit}`` once all it
wrote is in its spool. A row of ``list`` has the same ``reason`` as the first, for whoever was not
there to be told.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from sandboxd.errors import NodeVersionMismatch

VERSION: Final = 1
"""Of what is above; raised by a change that the other side cannot do without."""

MESSAGE_MAX: Final = 64 * 1024
"""Bytes of a datagram: fits net.core.wmem_default (212,992) with its bookkeeping."""

META_MAX: Final = 16 * 1024
"""Bytes of a sandbox's ``meta`` as JSON."""

FDS_MAX: Final = 64

PAGE_BYTES: Final = MESSAGE_MAX - META_MAX - 4096
"""Of rows in one answer to ``list``: one more, with all the meta it may have, still fits."""


@dataclass(frozen=True, slots=True)
class SandboxRow:
    """One sandbox as ``list`` gives it."""

    sandbox: str
    pid: int
    state: str
    images: tuple[str, ...]
    meta: dict[str, Any]
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


encode: Final = json.JSONEncoder(separators=(",", ":")).encode
"""A message as text; made once, as ``json.dumps`` would make an encoder for each."""
_decode: Final = json.JSONDecoder().decode

# As plain numbers: of two members of an IntFlag Python makes a third, at ten times the cost.
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)
_FDS_SPACE: Final = socket.CMSG_SPACE(FDS_MAX * 4)


def mismatch(daemon: str, node: str) -> NodeVersionMismatch:
    """The error of two that do not speak the same."""
    return NodeVersionMismatch(
        f"the daemon speaks version {daemon} of the node's protocol, the node {node}",
        hint="restart sandboxd-node once its sandboxes may end, or go back to the other version",
    )


def page(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many of the first rows as one answer takes, and one at least."""
    chosen: list[dict[str, Any]] = []
    room = PAGE_BYTES
    for row in rows:
        if room <= 0:
            break
        chosen.append(row)
        room -= len(encode(row)) + 1
    return chosen


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message. Raises OSError as sendmsg(2) does; BlockingIOError on a full queue."""
    data = encode(message).encode()
    if len(data) > MESSAGE_MAX:
        raise ValueError(f"message of {len(data)} bytes is larger than {MESSAGE_MAX}")
    ancillary = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
    )
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One message and its fds (close-on-exec, the caller's to close); None at the end.

    Raises OSError as recvmsg(2) does, and ValueError, with all fds closed, for what is no message.
    """
    data, ancillary, flags, _ = sock.recvmsg(MESSAGE_MAX, _FDS_SPACE, _CLOSE_ON_EXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        message = _parsed(data, flags)
    except ValueError:
        for fd in fds:
            os.close(fd)
        raise
    return message, list(fds)


def _parsed(data: bytes, flags: int) -> dict[str, Any] | None:
    if flags & _TRUNCATED:
        raise ValueError("message or its file descriptors were truncated")
    message = _decode(data.decode()) if data else None
    if not isinstance(message, dict | None):
        raise ValueError("message is not a JSON object")  # noqa: TRY004 - as for other nonsense
    return message
