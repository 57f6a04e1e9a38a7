"""``sandboxd slurm node``: what srun runs on each node of a job, from its start to its end.

Order, and why:
  1. what killed steps left on this node is removed: it holds memory that the job has asked for;
  2. the directory of this job and node on the node's own disk;
  3. the listening socket, bound here and passed on as a service manager would: its port is known
     before the daemon starts, and stays when the daemon has to be started again;
  4. `sandboxd serve`, until it says that it is ready;
  5. the file on shared storage: whoever finds it can connect;
  6. at SIGTERM, or once that file is gone: the file first, so that nobody comes any more, then the
     daemon, then what it may have left, and the directory.

A daemon that dies is started again on the same socket with the same token; its sandboxes are lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.client.slurm import JOB, NODE, SlurmNode, file_name, job_directory
from sandboxd.config import Config, load_config
from sandboxd.errors import ConfigError, FeatureMissing, NodeUnavailable
from sandboxd.service_manager import LISTEN_FDS_START
from sandboxd.slurm import instances, jobs
from sandboxd.slurm.publish import Publication

READY_S: Final = 120.0
READY_PAUSE_S: Final = 0.1
LOOK_S: Final = 5.0
"""How often a step looks whether its file is still there."""
STOP_S: Final = 25.0
"""For a daemon to end; KillWait of slurm.conf is 30 s by default, and then comes SIGKILL."""
RESTARTS_MAX: Final = 5
"""Of a daemon in one job: one that dies so often will not be mended by another start."""
BACKLOG: Final = 4096
_PASS_FD: Final = f"""
import os, sys
os.dup2({{fd}}, {LISTEN_FDS_START})
if {{fd}} != {LISTEN_FDS_START}:
    os.close({{fd}})
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in Slurm this process is."""

    job: str
    node: str
    restart: int
    job_end: float | None
    directory: Path


def place(env: Mapping[str, str], directory: str | None) -> Place:
    """Raises FeatureMissing outside a job."""
    job, node = env.get(JOB, ""), env.get(NODE, "")
    if not job or not node:
        raise FeatureMissing(
            "this is no step of a Slurm job", hint="sandboxd slurm launch makes one on every node"
        )
    file_name(node)  # refuses what cannot be a file's name
    end = env.get("SLURM_JOB_END_TIME", "")
    return Place(
        job,
        node,
        int(env.get("SLURM_RESTART_COUNT") or 0),
        float(end) if end.isdigit() else None,
        job_directory(job, directory),
    )


def run(here: Place, config: Config, config_file: Path | None, host: str | None) -> int:
    """Serve until the job ends; the exit status. ``host``: the address to listen on, by default
    the one that Slurm has for this node.

    Raises ConfigError, FeatureMissing, NodeUnavailable.
    """
    if not here.directory.is_dir():
        raise ConfigError(
            f"{here.directory} is not there",
            hint="the batch script makes it, on storage that all nodes share",
        )
    # The job's umask is its user's: the API's account has to get through to the sockets. What is a
    # secret is written 0600.
    os.umask(0o022)
    with contextlib.ExitStack() as stack:
        wake = stack.enter_context(_signals())
        _remove_dead()
        own = instances.claim(here.job, here.node, config.cgroup_root)
        stack.callback(_remove, own)
        listener = stack.enter_context(_listen(host or jobs.node_address(here.node), config))
        name = {"SANDBOXD_NODE_NAME": here.node} if config.node_name == socket.gethostname() else {}
        daemon = _Daemon(_command(config, config_file, own), listener, name)
        stack.callback(daemon.stop)
        daemon.start()
        if not daemon.wait_ready(wake):
            return 0
        published = _publish(here, own, config_file, listener)
        stack.callback(published.remove)
        return _watch(daemon, published, wake)


def _watch(daemon: _Daemon, published: Publication, wake: socket.socket) -> int:
    restarts = 0
    while True:
        ready = _readable(wake, daemon.pidfd, LOOK_S)
        if wake.fileno() in ready:
            _say("asked to end")
            return 0
        if ready:
            _say(f"the daemon ended ({daemon.wait()}); its sandboxes are lost")
            restarts += 1
            if restarts > RESTARTS_MAX:
                raise NodeUnavailable("the daemon dies again and again; its log says why")
            daemon.start()
            daemon.wait_ready(wake)
        elif published.is_gone():
            _say("the job has ended without a word: its file is gone")
            return 0


def _readable(wake: socket.socket, pidfd: int, timeout_s: float) -> list[int]:
    return select.select([wake.fileno(), pidfd], [], [], timeout_s)[0]


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket with a byte in it once SIGTERM or SIGINT came."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(-1)


def _listen(host: str, config: Config) -> socket.socket:
    """With the port that was configured, where one was; else with any."""
    port = 0
    if config.listen != Config().listen:  # a file may hold every default
        port = config.address[1]
        if config.address[0] not in ("0.0.0.0", "::"):
            host = config.address[0]
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="give --listen HOST:PORT; port 0 is any that is free",
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _command(
    config: Config, config_file: Path | None, own: instances.InstanceDirectory
) -> list[str]:
    command = [sys.executable, "-m", "sandboxd", "serve"]
    command += ["--runtime-dir", str(own.runtime_dir), "--state-dir", str(own.state_dir)]
    if config_file is not None:
        command += ["--config", str(config_file)]
    # By default images lie in state_dir, and the daemon's ends with the job.
    return [*command, "--images-dir", config.images_dir, "--node", "own"]


class _Daemon:
    """`sandboxd serve` as our child, with the listening socket as its fd 3."""

    def __init__(
        self, command: Sequence[str], listener: socket.socket, settings: Mapping[str, str]
    ) -> None:
        self._command = command
        self._settings = settings
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1

    def start(self) -> None:
        # sd_listen_fds(3): the number must be 3, and the pid that of the daemon itself, which
        # nobody knows before the fork: so a line of Python that becomes the daemon.
        env = {**os.environ, **self._settings, "LISTEN_FDS": "1"}
        fd = self._listener.fileno()
        shim = [sys.executable, "-c", _PASS_FD.format(fd=fd), *self._command]
        self._process = subprocess.Popen(shim, stdin=subprocess.DEVNULL, env=env, pass_fds=(fd,))
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = os.pidfd_open(self._process.pid)

    def wait_ready(self, wake: socket.socket) -> bool:
        """False where we are to end before. Raises NodeUnavailable where it ends itself."""
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while not self._answers():
            ready = _readable(wake, self.pidfd, READY_PAUSE_S)
            if wake.fileno() in ready:
                return False
            if ready:
                raise NodeUnavailable("the daemon did not start; what it said above tells why")
            if time.monotonic() > deadline:
                raise NodeUnavailable(f"the daemon is not ready after {READY_S:.0f} s")
        return True

    def _answers(self) -> bool:
        url = _url(self._listener) + "/readyz"
        # Not through a proxy of the environment's.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """Idempotent; what does not end in time is killed."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            _say("the daemon does not end; it is killed")
            self._process.kill()
            self._process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self._process, self.pidfd = None, -1


def _publish(
    here: Place,
    own: instances.InstanceDirectory,
    config_file: Path | None,
    listener: socket.socket,
) -> Publication:
    as_the_daemon = load_config(config_file, overrides={"state_dir": str(own.state_dir)})
    token = Path(as_the_daemon.token_file).read_text(encoding="ascii").strip()
    node = SlurmNode(
        here.job, here.node, _url(listener), token, here.restart, here.job_end, time.time()
    )
    published = Publication(here.directory, node)
    published.write()
    _say(f"serving at {node.url}")
    return published


def _remove_dead() -> None:
    for path, failures in instances.remove_dead():
        _say(f"removed what was left in {path}" if not failures else f"left: {failures}")


def _remove(own: instances.InstanceDirectory) -> None:
    for failure in own.remove():
        _say(f"left behind: {failure}")


def _say(text: str) -> None:
    print(f"sandboxd: {text}", file=sys.stderr, flush=True)
