"""The daemon's processes, started and ended: hostd, a child that stays root, and the API.

Order of a start, and why:
  1. as root: directories, the token (readable by the API's account alone), the listening socket;
  2. the lock of ``runtime_dir``, then hostd, unless one that is a unit of its own serves there;
     ours is ended with us by a pipe that closes when this process ends, however it ends;
  3. everything is imported that a request may need: the account may not be able to read Python's
     own files;
  4. the account's ids, for good; then the API serves.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pkgutil
import pwd
import resource
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import uvicorn

from sandboxd.api.app import create_app
from sandboxd.config import Config, ensure_token
from sandboxd.errors import ConfigError, FeatureMissing, NodeUnavailable
from sandboxd.host import node_lock
from sandboxd.linux.process import raise_limit, set_dumpable, set_no_new_privs
from sandboxd.runtime.manager import Runtime

NOFILE: Final = 1_048_576
"""A handful for each sandbox and each exec."""

NODE_START_S: Final = 40.0
NODE_STOP_S: Final = 20.0
BACKLOG: Final = 4096

_IMPORTED_WHOLE: Final = (
    "anyio",
    "encodings",
    "fastapi",
    "pydantic",
    "sandboxd.api",
    "sandboxd.images",
    "sandboxd.runtime",
    "sif_tools",
    "starlette",
    "uvicorn",
)
"""Packages that import parts of themselves when those are first used."""
_LATE_IMPORTS: Final = ("email.message", "h11", "httptools", "multiprocessing", "uvloop")
# Plug-ins for other tools, the former version, and what only starts a program.
_NOT_IMPORTED: Final = frozenset(
    {"__main__", "cli", "mypy", "supervisors", "testclient", "v1", "workers", "wsgi"}
)


@dataclass(slots=True)
class _Node:
    """hostd as our child; ``lifeline`` is the pipe end whose closing ends it."""

    process: subprocess.Popen[bytes]
    lifeline: int

    def stop(self) -> None:
        os.close(self.lifeline)
        try:
            self.process.wait(NODE_STOP_S)
        except subprocess.TimeoutExpired:
            # Not ours to signal any more (it is root, we are not): it has the closed pipe.
            print("sandboxd: the node is still being taken down", file=sys.stderr)


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises ConfigError, FeatureMissing, NodeUnavailable.
    """
    if os.geteuid() != 0:
        raise FeatureMissing(
            "sandboxd must be started as root; it gives root up before it serves",
            hint="the rootless mode is not there yet",
        )
    try:
        account = pwd.getpwnam(config.user)
    except KeyError:
        raise FeatureMissing(
            f"there is no account {config.user!r}", hint="run scripts/install, which makes it"
        ) from None
    if account.pw_uid == 0:
        raise ConfigError("the API does not run as root", hint="set user to another account")
    _make_directories(config)
    token = ensure_token(_token_path(config), account.pw_uid, account.pw_gid)
    with closing(_listen(config)) as listener:
        lock = node_lock.claim(config.runtime_dir)
        node = None if lock is None else _start_node(config, lock)
        try:
            _become(account)
            return _serve(config, token, listener, node)
        finally:
            if node is not None:
                node.stop()


def _make_directories(config: Config) -> None:
    for path in (config.state_dir, config.runtime_dir, config.images_dir):
        os.makedirs(path, mode=0o755, exist_ok=True)


def _token_path(config: Config) -> str:
    return config.token_file or os.path.join(config.state_dir, "token")


def _listen(config: Config) -> socket.socket:
    host, port = config.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.listen}: {error.strerror}",
            hint="is another sandboxd running? give another --listen",
        ) from error
    listener.listen(BACKLOG)
    return listener


def cgroup_name(config: Config) -> str:
    """One name for each runtime directory: two daemons never touch each other's cgroups."""
    instance = hashlib.sha256(os.path.realpath(config.runtime_dir).encode()).hexdigest()[:8]
    return f"{config.cgroup_root}-{instance}"


def _start_node(config: Config, lock: int) -> _Node:
    lifeline_read, lifeline = os.pipe2(os.O_CLOEXEC)
    ready, ready_write = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-m", "sandboxd.host"]
    command += ["--account", config.user, "--runtime-dir", config.runtime_dir]
    command += ["--cgroup-name", cgroup_name(config), "--squashfuse", config.squashfuse]
    command += ["--max-sandboxes", str(config.max_sandboxes)]
    command += ["--slots-min", str(config.slots_min), "--slots-max", str(config.slots_max)]
    command += ["--lifeline-fd", str(lifeline_read), "--ready-fd", str(ready_write)]
    command += ["--lock-fd", str(lock)]
    # A session of its own: a Ctrl-C in the terminal is for us, and we end it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(lifeline_read, ready_write, lock),
        start_new_session=True,
    )
    os.close(lifeline_read)
    os.close(ready_write)
    node = _Node(process, lifeline)
    with os.fdopen(ready, "rb") as pipe:
        if not pipe.read(1):  # its end, if it failed
            node.stop()
            raise NodeUnavailable("the node did not start; what it said above tells why")
    return node


def _import_late_modules() -> None:
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    for package in _IMPORTED_WHOLE:
        _import_whole(importlib.import_module(package))


def _import_whole(package: ModuleType) -> None:
    """Import every module of a package, but for those that this installation has no use for."""
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if found.name.rpartition(".")[2] in _NOT_IMPORTED:
            continue
        try:
            module = importlib.import_module(found.name)
        except Exception:  # noqa: BLE001 - it needs what is not installed: never used then
            continue
        if found.ispkg:
            _import_whole(module)


def _become(account: pwd.struct_passwd) -> None:
    """Give root up for good. Nothing of the account's may read this process's memory: the token."""
    _import_late_modules()
    raise_limit(resource.RLIMIT_NOFILE, NOFILE)
    os.setgroups([])
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    set_no_new_privs()
    set_dumpable(False)
    os.chdir("/")


class _Server(uvicorn.Server):
    """uvicorn, ended when hostd ends: only root could start that again."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, node: _Node | None) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._node = node

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Whoever waits for a command hears at once why it has no result; uvicorn would wait for
        # its end, and after timeout_graceful_shutdown cut it off without a word.
        error = NodeUnavailable("the daemon is stopping")
        with suppress(NodeUnavailable):
            for sandbox in self._runtime.sandboxes():
                sandbox.disconnect(error)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._node is not None and counter % 10 == 0 and self._node.process.poll() is not None:
            logging.getLogger(__name__).error("the node ended; so does the daemon")
            return True
        return await super().on_tick(counter)


def _serve(config: Config, token: str, listener: socket.socket, node: _Node | None) -> int:
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    runtime = Runtime(config)
    app = create_app(config, runtime, token=token)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            backlog=BACKLOG,
            server_header=False,
            timeout_graceful_shutdown=10,
        ),
        runtime,
        node,
    )
    # uvicorn raises the signal again once it has ended; here ending is what was asked for.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    failed = not server.started or (node is not None and node.process.poll() is not None)
    return 1 if failed else 0
