"""A private `sandboxd serve` for the length of one script, and its certain end.

For: quickstart and bench. Not for: production (deploy/) or tests, which have their own that also
checks for leaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

PR_SET_CHILD_SUBREAPER = 36
READY_S = 60.0
STOP_S = 30.0


class DaemonError(Exception):
    """The daemon or a request failed; the message is for a person."""


class LocalDaemon:
    """Not running until `start`; `http` has the token set from then on."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.images_dir = home / "images"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.base_url = f"http://{self.address}"
        self.http = httpx.Client(base_url=self.base_url, timeout=300)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def token(self) -> str:
        """Of a daemon that was started."""
        return (self.home / "state/token").read_text().strip()

    @property
    def pid(self) -> int:
        """Of the process that was started; others of the node are its descendants."""
        assert self._process is not None
        return self._process.pid

    def start(self, settings: Mapping[str, str] | None = None) -> None:
        """Start it and wait until it is ready. Raises DaemonError with the end of its log.

        `settings` by name, as in the configuration file.
        """
        command = [sys.executable, "-m", "sandboxd", "serve", "--listen", self.address]
        command += ["--images-dir", str(self.images_dir), "--state-dir", str(self.home / "state")]
        command += ["--runtime-dir", str(self.home / "run")]
        # Nothing of the caller's settings: this daemon is its own, and its cgroups can be told.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SANDBOXD_")}
        environment["SANDBOXD_CGROUP_ROOT"] = self.home.name
        environment |= {f"SANDBOXD_{k.upper()}": v for k, v in (settings or {}).items()}
        with (self.home / "log").open("wb") as log:
            # A session of its own: Ctrl-C is for this script, which then stops the daemon.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._wait_ready(self._process.pid)
        self.http.headers["Authorization"] = f"Bearer {self.token}"

    def _wait_ready(self, pid: int) -> None:
        deadline = time.monotonic() + READY_S
        pidfd = os.pidfd_open(pid)
        try:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if self.http.get("/readyz", timeout=5).status_code == httpx.codes.OK:
                        return
                if select.select([pidfd], [], [], 0.02)[0]:
                    raise DaemonError(f"the daemon ended at once:\n{self.log_tail()}")
                if time.monotonic() > deadline:
                    raise DaemonError(f"not ready after {READY_S:.0f} s:\n{self.log_tail()}")
        finally:
            os.close(pidfd)

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join((self.home / "log").read_text(errors="replace").splitlines()[-lines:])

    def call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """One request; what the API refuses becomes a `DaemonError` in its own words."""
        try:
            answer = self.http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise DaemonError(f"{method} {path}: {error}\n{self.log_tail()}") from error
        if not answer.is_success:
            raise DaemonError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer

    def stop(self) -> None:
        """SIGTERM, and SIGKILL with a DaemonError if that is not enough."""
        self.http.close()
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise DaemonError(f"had to be killed:\n{self.log_tail()}") from None


@contextlib.contextmanager
def local_daemon(name: str) -> Iterator[LocalDaemon]:
    """A daemon with everything in a directory of its own, to be given images and started.

    After the block, and after any failure or signal, neither process nor file is left.
    """
    _become_subreaper()
    with contextlib.ExitStack() as stack:
        # Readable for all: the daemon's parts are not root.
        home = Path(tempfile.mkdtemp(prefix=f"sandboxd-{name}-"))
        home.chmod(0o755)
        stack.callback(shutil.rmtree, home)
        stack.callback(_unmount_below, home)
        for directory in ("images", "state", "run"):
            (home / directory).mkdir()
        stack.callback(_remove_cgroups, home.name)
        stack.callback(_end_descendants)
        daemon = LocalDaemon(home)
        stack.callback(daemon.stop)
        yield daemon


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C, and let none of them disturb the unwinding."""
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in handled:
        signal.signal(each, interrupt)
    yield


def _become_subreaper() -> None:
    """Orphans of the daemon come to us, so that none can be overlooked (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, *(ctypes.c_ulong(n) for n in (1, 0, 0, 0)))


def _end_descendants() -> None:
    """Kill and reap whatever the daemon left; for the case that it crashed or was killed."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.wait()


def _unmount_below(directory: Path) -> None:
    """Detach what a crashed daemon left mounted, or removing the directory would walk into it."""
    with Path("/proc/self/mountinfo").open() as mountinfo:
        mountpoints = [line.split(" ")[4] for line in mountinfo]
    for point in reversed(mountpoints):
        if Path(point).is_relative_to(directory):
            subprocess.run(["umount", "--lazy", point], check=False)


def _remove_cgroups(name: str) -> None:
    """Remove the empty groups a killed daemon left; their paths hold `name`."""
    with Path("/proc/self/mountinfo").open() as mountinfo:
        lines = [line.split(" ") for line in mountinfo]
    for fields in lines:
        if fields[fields.index("-") + 1] not in ("cgroup", "cgroup2"):
            continue
        for directory, _, _ in os.walk(fields[4], topdown=False):
            if name in directory:
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
