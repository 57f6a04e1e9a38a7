"""Who builds what: claims that save work, and are the dead give up. See the package.

A claim's file holds::

    {"host": …, "boot": …, "pid": …, "pid_namespace": …, "started": …, "token": …}

with `started` as /proc/PID/stat counts it, in ticks since boot.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sif_tools.errors import StoreFull, StoreWriteFailed
from sif_tools.store.files import make_parents, server_time

HEARTBEAT_S: Final = 10.0
STALE_S: Final = 90.0
"""Nine heartbeats: a file server that hangs for a minute voids no claim."""

_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 2.0
_MAX_CLAIM_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told from all others that ever were."""

    host: str
    boot: str
    pid: int
    pid_namespace: str
    started: int
    token: str


def this_process() -> Owner:
    """Names this process, with a token of its own each time."""
    pid = os.getpid()
    return Owner(
        socket.gethostname(),
        _boot_id(),
        pid,
        _pid_namespace(),
        _started(pid) or 0,
        secrets.token_hex(16),
    )


class Claim:
    """A claim that is held; touched by a thread until it is released."""

    def __init__(self, path: Path, fd: int, owner: Owner, heartbeat_s: float) -> None:
        self._path = path
        self._fd = fd
        self._owner = owner
        self._heartbeat_s = heartbeat_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="sif-claim", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            # Through the descriptor: the name may be another's by now.
            with suppress(OSError):
                os.utime(self._fd)

    def release(self) -> None:
        """Let go of it, unless somebody has taken it for void and over."""
        self._ended.set()
        self._thread.join()
        try:
            with suppress(OSError):
                if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                    self._path.unlink()
        finally:
            os.close(self._fd)


class Claims:
    """The claims of one store. `heartbeat_s` and `stale_s` must be the same for all its users."""

    def __init__(
        self,
        path_of: Callable[[str], Path],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._path_of = path_of
        self._heartbeat_s = heartbeat_s
        self._stale_s = stale_s

    def take(self, key: str) -> Claim | None:
        """The claim on `key`; None while another's stands. Raises StoreFull, StoreWriteFailed."""
        path = self._path_of(key)
        owner = this_process()
        try:
            make_parents(path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return None
        except OSError as error:
            raise StoreWriteFailed(f"{path}: {error.strerror}") from error
        try:
            os.write(fd, json.dumps(asdict(owner)).encode())
        except OSError as error:
            os.close(fd)
            with suppress(OSError):
                path.unlink()
            raise StoreFull(f"{path}: {error.strerror}") from error
        return Claim(path, fd, owner, self._heartbeat_s)

    def wait(self, key: str, done: Callable[[], bool]) -> None:
        """Until `done`, or until the claim is gone or void; a void one is removed."""
        watch = _Watch(self._path_of(key), self._stale_s)
        pause_s = _FIRST_WAIT_S
        while not done() and not watch.is_gone():
            if watch.is_void():
                watch.remove()
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_WAIT_S)


class _Watch:
    """Somebody else's claim, looked at again and again."""

    def __init__(self, path: Path, stale_s: float) -> None:
        self._path = path
        self._stale_s = stale_s
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0
        self._asked_at = 0.0

    def is_gone(self) -> bool:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # a server that does not answer says nothing about the claim
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return False

    def is_void(self) -> bool:
        if self._seen is None:
            return False
        if _is_dead(_read(self._path)):
            return True
        now = time.monotonic()
        if now - self._seen_at > self._stale_s:
            return True
        # Not more often than the answer can change; and the clock costs three requests.
        if self._asked_at and now - self._asked_at < self._stale_s / 10:
            return False
        self._asked_at = now
        with suppress(OSError):
            return server_time(self._path.parent) - self._seen[1] / 1e9 > self._stale_s
        return False

    def remove(self) -> None:
        """Rename it away, which only one can; and back, should it be another claim by now."""
        aside = self._path.with_name(f".void.{secrets.token_hex(8)}.tmp")
        try:
            os.rename(self._path, aside)
        except OSError:
            return  # another was first
        with suppress(OSError):
            status = os.stat(aside)
            if (status.st_ino, status.st_mtime_ns) != self._seen:
                with suppress(FileExistsError):
                    os.link(aside, self._path)
        with suppress(OSError):
            aside.unlink()


def _read(path: Path) -> Any:
    """What a claim says, None for one that says nothing (its maker was killed before it did)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return json.loads(os.read(fd, _MAX_CLAIM_BYTES))
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None


def _is_dead(said: Any) -> bool:
    """Whether it is certain that the maker lives no more; its time stamp decides otherwise."""
    if not isinstance(said, dict) or said.get("host") != socket.gethostname():
        return False
    if said.get("boot") != _boot_id():
        return True
    pid = said.get("pid")
    # A pid means nothing in another pid namespace.
    if said.get("pid_namespace") != _pid_namespace() or not isinstance(pid, int):
        return False
    return _started(pid) != said.get("started")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc(5)); None for no such process, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
