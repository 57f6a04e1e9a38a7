"""A real `sandboxd serve` for tests: on a free loopback port, with directories of its own.

For: e2e and security tests, through the fixtures `daemon` and `start_daemon`. Not for: talking to
it beyond what every test needs; `Daemon.http` is a plain HTTP client with the token set, so that a
test of the API does not depend on the package's own client.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.framework import host_state, times
from tests.framework.leaks import LeakCheck

READY_S = times.scaled(30.0)
STOP_S = times.scaled(30.0)
SETTLE_S = times.scaled(10.0)
SLOTS = 4


class DaemonError(Exception):
    """The daemon did not come up or did not go down; the message holds the end of its log."""


@dataclass
class Daemon:
    """One running daemon. `pid` is the process that was started; its family does the work."""

    process: subprocess.Popen[bytes]
    base_url: str
    state_dir: Path
    runtime_dir: Path
    images_dir: Path
    log_file: Path
    http: httpx.Client = field(init=False)
    family: set[int] = field(default_factory=set)
    relay: subprocess.Popen[bytes] | None = None
    """Leads to it where it is in a network namespace of its own."""

    def __post_init__(self) -> None:
        # The daemon closes a connection that was idle for 75 s: never a request into that moment.
        limits = httpx.Limits(keepalive_expiry=3)
        self.http = httpx.Client(base_url=self.base_url, timeout=times.scaled(120), limits=limits)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def token(self) -> str:
        return (self.state_dir / "token").read_text().strip()

    @property
    def api_pid(self) -> int:
        """The process that owns the listening socket, which need not be the one started."""
        port = int(self.base_url.rpartition(":")[2])
        inode = _listening_inode(port)
        for pid in (self.pid, *sorted(self.refresh_family())):
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    if os.readlink(entry.path) == f"socket:[{inode}]":
                        return pid
        raise DaemonError(f"nothing of ours listens on port {port}")

    def refresh_family(self) -> set[int]:
        """Every process of this daemon, those that outlive it when it is killed included."""
        table = host_state.process_table()
        alive = {pid for pid in {self.pid, *self.family} if pid in table}
        for pid in list(alive):
            alive |= {process.pid for process in table[pid].descendants()}
        self.family = alive
        return alive

    def log_tail(self, lines: int = 40) -> str:
        text = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        pidfd = os.pidfd_open(self.pid)
        try:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (
                        self.http.get("/readyz", timeout=times.scaled(2)).status_code
                        == httpx.codes.OK
                    ):
                        break
                if time.monotonic() > deadline:
                    raise DaemonError(f"not ready after {timeout_s} s\n{self.log_tail()}")
                # Readiness has no event of its own here; an early end has one.
                if select.select([pidfd], [], [], 0.02)[0]:
                    status = self.process.wait()
                    raise DaemonError(f"ended at once with {status}\n{self.log_tail()}")
        finally:
            os.close(pidfd)
        self.http.headers["Authorization"] = f"Bearer {self.token}"
        self.refresh_family()

    def settle(self) -> None:
        """Bring what comes and goes with time into the same state: one live keep-alive connection,
        which both sides drop after a while, and the pool of slots full (SLOTS, neither growing nor
        shrinking in a daemon under test) with nothing of the dead left in the launcher."""
        deadline = time.monotonic() + SETTLE_S
        with contextlib.suppress(httpx.TransportError):
            while time.monotonic() < deadline:
                answer = self.http.get("/v1/node", timeout=times.scaled(5))
                if not answer.is_success:
                    return  # a node that is down has no pool
                counts = answer.json()["counts"]
                if counts["slots_ready"] == SLOTS and counts["in_teardown"] == 0:
                    return
                time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the started process alone, and wait for its end if that is certain."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(STOP_S)

    def stop(self) -> None:
        """SIGTERM, and the end of everything it started; what does not go is killed and told."""
        self.refresh_family()
        self.http.close()
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
        late: set[int] = set()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                late.add(self.pid)
        deadline = time.monotonic() + STOP_S / 6
        late |= {pid for pid in self.family if not _ended(pid, deadline)}
        for pid in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if late:
            raise DaemonError(f"still there after SIGTERM: pids {sorted(late)}\n{self.log_tail()}")

    # What nearly every test does.

    def create(self, image: str, **spec: Any) -> str:
        """Make a sandbox and return its id."""
        answer = self.http.post("/v1/sandboxes", json={"image": image, **spec})
        assert answer.status_code == httpx.codes.CREATED, answer.text
        return str(answer.json()["id"])

    def exec(self, sandbox: str, command: Sequence[str] | str, **request: Any) -> dict[str, Any]:
        body = {"command": command if isinstance(command, str) else list(command), **request}
        answer = self.http.post(f"/v1/sandboxes/{sandbox}/exec", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def delete(self, sandbox: str) -> None:
        answer = self.http.delete(f"/v1/sandboxes/{sandbox}")
        assert answer.is_success, answer.text

    @contextlib.contextmanager
    def sandbox(self, image: str, **spec: Any) -> Iterator[str]:
        name = self.create(image, **spec)
        try:
            yield name
        finally:
            self.delete(name)

    def warm_up(self, image: str) -> None:
        """Let the daemon take what it keeps for as long as it uses this image (its mount)."""
        with self.sandbox(image) as name:
            self.exec(name, ["/bin/true"])


@contextlib.contextmanager
def running_daemon(
    check: LeakCheck,
    images: dict[str, Path],
    arguments: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    network: Sequence[str] = (),
) -> Iterator[Daemon]:
    """Start a daemon that knows `images` (name: SIF file), and stop it; both leak-checked."""
    # Not below pytest's own directory: that is 0700, and the daemon's processes are not root.
    with check.around("the daemon"), contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX))
        stack.callback(shutil.rmtree, home)
        home.chmod(0o755)
        for name, file in images.items():
            (home / "images").mkdir(exist_ok=True)
            shutil.copyfile(file, home / "images" / f"{name}.sif")
            (home / "images" / f"{name}.sif").chmod(0o444)
        daemon = start(home, arguments, environment, network)
        stack.callback(daemon.stop)
        daemon.wait_ready()
        directories = {daemon.state_dir, daemon.runtime_dir, daemon.images_dir}
        with check.long_lived(daemon.family | {daemon.pid}, directories, daemon.settle):
            yield daemon


def start(
    home: Path,
    arguments: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    network: Sequence[str] = (),
    before: Sequence[str] = (),
) -> Daemon:
    """Start a daemon with everything below `home`, without waiting for it.

    Starting again with the same `home` is a restart. `network`: the words that put a command into
    the network namespace that it is to serve in. `before`: those that make it another user's, in
    the same process.
    """
    images_dir, state_dir, runtime_dir = home / "images", home / "state", home / "run"
    for directory in (images_dir, state_dir, runtime_dir):
        directory.mkdir(exist_ok=True)
    address = f"127.0.0.1:{free_port()}"
    log_file = home / "log"
    command = [*network, *before, sys.executable, "-m", "sandboxd", "serve", "--listen", address]
    command += ["--state-dir", str(state_dir), "--runtime-dir", str(runtime_dir)]
    command += ["--images-dir", str(images_dir), *arguments]
    settings = {
        "SANDBOXD_CGROUP_ROOT": home.name,
        "SANDBOXD_SLOTS_MIN": str(SLOTS),
        "SANDBOXD_SLOTS_MAX": str(SLOTS),
        # What is held ahead of need differs from one moment to the next, as leaks would.
        "SANDBOXD_SLOTS_PRIMED": "0",
    }
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_without_settings() | settings | (environment or {}),
        )
    relay = None
    if network:
        relay, address = _relay(network, address)
    return Daemon(
        process,
        f"http://{address}",
        state_dir,
        runtime_dir,
        images_dir,
        log_file,
        relay=relay,
    )


def _relay(network: Sequence[str], address: str) -> tuple[subprocess.Popen[bytes], str]:
    """A process that leads from here to `address` there, and where it listens."""
    program = Path(__file__).with_name("relay.py")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        fd = listener.fileno()
        command = [*network, sys.executable, str(program), str(fd), address.rpartition(":")[2]]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,))
        return process, f"127.0.0.1:{listener.getsockname()[1]}"


def _without_settings() -> dict[str, str]:
    """The environment less everything the daemon would read from it, our own switches included."""
    return {key: value for key, value in os.environ.items() if not key.startswith("SANDBOXD_")}


def free_port() -> int:
    """A port that was free a moment ago; nothing reserves it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listening_inode(port: int) -> str:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and int(local.partition(":")[2], 16) == port:  # TCP_LISTEN
            return rest[5]
    raise DaemonError(f"nothing listens on port {port}")


def _ended(pid: int, deadline: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError as error:
        # Linux 6.1: ended, but its number is still that of a session or a group.
        if error.errno != errno.EINVAL:
            raise
        return True
    try:
        remaining_s = max(0.0, deadline - time.monotonic())
        return bool(select.select([pidfd], [], [], remaining_s)[0])
    finally:
        os.close(pidfd)
