"""Starting a daemon again where another one has ended, however it ended; and a node that is a unit
of its own, beside which daemons come and go."""

from __future__ import annotations

import contextlib
import os
import pwd
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

import httpx

from tests.framework import host_state, times
from tests.framework.daemon import Daemon, free_port, start
from tests.framework.leaks import LeakCheck

NODE_START_S = times.scaled(40.0)
NODE_STOP_S = times.scaled(30.0)


@contextlib.contextmanager
def started_again(
    daemon: Daemon, environment: dict[str, str] | None = None, address: str = "127.0.0.1"
) -> Iterator[Daemon]:
    """A daemon with the directories of `daemon`, ready; stopped at the end."""
    port = free_port()
    again = start(daemon.state_dir.parent, ("--listen", f"{address}:{port}"), environment)
    again.http.close()
    again.base_url = f"http://127.0.0.1:{port}"
    limits = httpx.Limits(keepalive_expiry=3)
    again.http = httpx.Client(base_url=again.base_url, timeout=times.scaled(120), limits=limits)
    try:
        again.wait_ready()
        yield again
    finally:
        again.stop()


_ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.executable, [sys.executable, "-m", "sandboxd", *sys.argv[2:]])
"""


@dataclass
class Node:
    """`sandboxd node`, and the daemons that were started beside it."""

    process: subprocess.Popen[bytes]
    home: Path
    notices: socket.socket
    """Where it tells how it is, as a service manager's socket; each datagram is one."""
    environment: dict[str, str]
    daemons: list[Daemon] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.home / "node.log").read_text(errors="replace")

    def wait_notice(self, text: str, timeout_s: float = NODE_START_S) -> str:
        """The next notice that has `text` in it."""
        self.notices.settimeout(timeout_s)
        while True:
            try:
                notice = self.notices.recv(4096).decode()
            except TimeoutError:
                raise AssertionError(f"the node did not say {text!r}\n{self.log}") from None
            if text in notice:
                return notice

    def serve(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        node: str = "unit",
        ready: bool = True,
    ) -> Daemon:
        """A daemon beside this node; ready, unless it is to be caught at its start."""
        settings = self.environment | {"SANDBOXD_NODE": node} | (environment or {})
        daemon = start(self.home, arguments, settings)
        self.daemons.append(daemon)
        if ready:
            daemon.wait_ready()
        return daemon

    def serve_from(self, listener: socket.socket, notices: Path) -> Daemon:
        """A daemon that a service manager starts: with its socket as fd 3, as the account itself,
        and `notices` to tell it how it is."""
        command = [sys.executable, "-c", _ACTIVATE, str(listener.fileno()), "serve"]
        command += ["--node", "unit", "--state-dir", str(self.home / "state")]
        command += ["--runtime-dir", str(self.home / "run")]
        command += ["--images-dir", str(self.home / "images")]
        account = pwd.getpwnam("sandboxd")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SANDBOXD_")}
        log_file = self.home / "log"
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited | {"NOTIFY_SOCKET": str(notices), "WATCHDOG_USEC": "2000000"},
                pass_fds=(listener.fileno(),),
                user=account.pw_uid,
                group=account.pw_gid,
                extra_groups=[],
            )
        port = listener.getsockname()[1]
        daemon = Daemon(
            process,
            f"http://127.0.0.1:{port}",
            self.home / "state",
            self.home / "run",
            self.home / "images",
            log_file,
        )
        self.daemons.append(daemon)
        return daemon

    def kill_daemon(self, daemon: Daemon) -> None:
        """SIGKILL, as by the kernel or an operator; the node does not notice."""
        daemon.http.close()
        daemon.kill(signal.SIGKILL)

    def stop(self) -> None:
        for daemon in self.daemons:
            daemon.stop()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(NODE_STOP_S)
        self.notices.close()


@contextlib.contextmanager
def running_node(
    check: LeakCheck,
    images: dict[str, Path],
    environment: dict[str, str] | None = None,
    left: dict[str, bytes | None] | None = None,
    network: Sequence[str] = (),
) -> Iterator[Node]:
    """A node as a unit, with these images; it and its daemons are stopped and leak-checked.

    `network`: the words that put a command into the network namespace that the node is to have.

    `left`: what lies in its runtime directory before: files by name, a socket where the content is
    None, a directory where there is none.
    """
    with check.around("the node"), contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX))
        stack.callback(shutil.rmtree, home)
        home.chmod(0o755)
        for name in ("images", "state", "run"):
            (home / name).mkdir()
        for name, file in images.items():
            shutil.copyfile(file, home / "images" / f"{name}.sif")
            (home / "images" / f"{name}.sif").chmod(0o444)
        for name, content in (left or {}).items():
            if content is None:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
                    dead.bind(str(home / "run" / name))
            elif content:
                (home / "run" / name).write_bytes(content)
            else:
                (home / "run" / name).mkdir()
        node = start_node(home, environment, network)
        stack.callback(node.stop)
        node.wait_notice("READY=1")
        family = {node.process.pid} | {
            child.pid for child in host_state.process_table()[node.process.pid].descendants()
        }
        with check.long_lived(family, {home / "run", home / "state"}):
            yield node


def start_node(
    home: Path, environment: dict[str, str] | None = None, network: Sequence[str] = ()
) -> Node:
    """`sandboxd node` with everything below `home`, not waited for."""
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    path = home / "notices"
    path.unlink(missing_ok=True)
    notices.bind(str(path))
    settings = {
        "SANDBOXD_CGROUP_ROOT": home.name,
        "SANDBOXD_SLOTS_MIN": "4",
        "SANDBOXD_SLOTS_MAX": "4",
        **(environment or {}),
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SANDBOXD_")}
    with (home / "node.log").open("ab") as log:
        process = subprocess.Popen(
            [
                *network,
                sys.executable,
                "-m",
                "sandboxd",
                "node",
                "--runtime-dir",
                str(home / "run"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=inherited | settings | {"NOTIFY_SOCKET": str(path)},
        )
    return Node(process, home, notices, settings)


def wait_end(process: subprocess.Popen[bytes], timeout_s: float = NODE_STOP_S) -> int:
    """The exit status of a process that is expected to end."""
    deadline = time.monotonic() + timeout_s
    pidfd = os.pidfd_open(process.pid)
    try:
        left_s = deadline - time.monotonic()
        assert select.select([pidfd], [], [], left_s)[0], "it does not end"
    finally:
        os.close(pidfd)
    return process.wait()
