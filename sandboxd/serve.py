"""The daemon's processes, started and ended: hostd, a child that stays root, and the API.

Order of a start, and why:
  1. as root: directories, the token (readable by the API's account alone), the listening socket,
     or those that a service manager holds: they queue what comes while there is no daemon;
  2. the lock of ``runtime_dir``, then hostd, unless one that is a unit of its own serves there;
     ours is ended with us by a pipe that closes when this process ends, however it ends;
  3. everything is imported that a request may need: the account may not be able to read Python's
     own files;
  4. the account's ids, for good; then the API serves, once all sandboxes are known.

Beside a node that is a unit the daemon needs no root at all, and may run as the account from the
start. It may end at any time then; the sandboxes stay.

An ordinary user's daemon has a node of its own, which makes do without root
(``host/rootless.py``); both are his from the start to the end.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import pwd
import resource
import signal
import socket
import stat
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

import uvicorn

from sandboxd import logs
from sandboxd.api.app import create_app
from sandboxd.api.connections import bounded
from sandboxd.config import Config, ensure_token, is_rootless
from sandboxd.errors import ConfigError, FeatureMissing, NodeUnavailable
from sandboxd.host import node_lock
from sandboxd.host.command import hostd_command
from sandboxd.late_imports import import_whole
from sandboxd.linux.process import (
    lower_oom_score,
    raise_limit,
    raise_priority,
    set_dumpable,
    set_no_new_privs,
)
from sandboxd.runtime.capacity import most_connections
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.reloading import Reloader
from sandboxd.service_manager import ServiceManager, take_listeners

log = logging.getLogger(__name__)

NOFILE: Final = 1_048_576
"""A handful for each sandbox and each exec."""

NODE_START_S: Final = 40.0
NODE_STOP_S: Final = 20.0
ADOPTION_S: Final = 10.0
"""So long a daemon waits to know all sandboxes before it takes requests and says that it is
ready."""
END_S: Final = 10.0
"""For requests that were told that the daemon stops."""
BACKLOG: Final = 4096
KEEP_ALIVE_S: Final = 75
"""How long an idle connection is kept. Much longer than the client's ``KEEP_IDLE_S``: a request
that comes as its connection is closed is lost, and a busy worker's clock and ours are seconds
apart in what they have seen of each other."""

_IMPORTED_WHOLE: Final = (
    "anyio",
    "encodings",
    "fastapi",
    "prometheus_client",
    "pydantic",
    "sandboxd.api",
    "sandboxd.images",
    "sandboxd.runtime",
    "sif_tools",
    "starlette",
    "structlog",
    "uvicorn",
    "websockets",
)
"""Packages that import parts of themselves when those are first used."""
_LATE_IMPORTS: Final = ("email.message", "h11", "httptools", "multiprocessing", "uvloop")
# Plug-ins for other tools and other event loops, the former version, what only starts a program.
_NOT_IMPORTED: Final = frozenset(
    {
        *("cli", "mypy", "supervisors", "testclient", "v1", "workers", "wsgi"),
        *("_trio", "aiohttp", "django", "pytest_plugin", "router", "trio", "twisted"),
    }
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
            log.warning("the node is still being taken down")


def run(load: Callable[[], Config]) -> int:
    """Serve with what ``load`` gives, now and at a reload, until SIGTERM or SIGINT; returns the
    exit status.

    Raises ConfigError, FeatureMissing, NodeUnavailable.
    """
    config = load()
    is_root = os.geteuid() == 0
    rootless = is_rootless(config.user)
    account = None if rootless else _account(config)
    if account is not None:
        # Whoever starts it: directories made below are the account's way to its files.
        os.umask(0o022)
    if not is_root and not rootless and config.node == "own":
        raise FeatureMissing(
            "only root starts a node beside the service's account",
            hint='start sandboxd-node (sandboxd node), and set node to "auto"',
        )
    if rootless and config.node == "unit":
        raise FeatureMissing(
            f"the node that is a unit of its own serves the account {config.user!r} only",
            hint='set node to "auto", and this user gets a node of his own',
        )
    _make_directories(config, is_root, rootless)
    uid, gid = (-1, -1) if account is None else (account.pw_uid, account.pw_gid)
    if config.image_copies_mb:
        _make_copies_directory(config.image_copies_dir, uid, gid)
    token = ensure_token(_token_path(config), uid, gid)
    logs.configure(config, token, os.environ)
    # Before hostd is started, which inherits it: the zygote and the image servers set their own.
    spared = lower_oom_score(config.oom_score_adjust) <= config.oom_score_adjust
    if not spared and not rootless:
        log.warning("the OOM killer is not told to spare it: no right to")
    with ExitStack() as stack:
        listeners = take_listeners(os.environ) or [_listen(config)]
        for listener in listeners:
            stack.enter_context(listener)
        lock = None
        if (is_root or rootless) and config.node != "unit":
            lock = node_lock.claim(config.runtime_dir)
            if lock is None and config.node == "own":
                raise ConfigError(
                    f"a node that is a unit of its own serves in {config.runtime_dir}",
                    hint='stop it, or set node to "auto"',
                )
        node = None if lock is None else _start_node(config, lock)
        if node is None:
            node_lock.claim_api(config.runtime_dir)
        try:
            _become(account)
            return _serve(config, load, token, listeners, node)
        finally:
            if node is not None:
                node.stop()


def _account(config: Config) -> pwd.struct_passwd:
    try:
        account = pwd.getpwnam(config.user)
    except KeyError:
        raise FeatureMissing(
            f"there is no account {config.user!r}", hint="run scripts/install, which makes it"
        ) from None
    if account.pw_uid == 0:
        raise ConfigError("the API does not run as root", hint="set user to another account")
    return account


def _make_copies_directory(path: str, uid: int, gid: int) -> None:
    """The API's account writes there, and nobody else."""
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
        os.chown(path, uid, gid)
    except OSError as error:
        hint = "give another --image-copies-dir"
        raise ConfigError(f"{path}: {error.strerror}", hint=hint) from error


def _make_directories(config: Config, is_root: bool, rootless: bool) -> None:
    if rootless:
        _make_private(config.runtime_dir)
    # The sockets' directory is the node's: only root makes it.
    mine = (config.state_dir, config.images_dir, *((config.runtime_dir,) if is_root else ()))
    for path in mine:
        try:
            os.makedirs(path, mode=0o755, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}", hint="give another --state-dir or --images-dir"
            ) from error


def _make_private(path: str) -> None:
    """A directory for nobody but this user. One that is there, in a /tmp that all write to, may be
    somebody else's trap. Raises ConfigError."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="give another --runtime-dir") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} is not a directory of this user's", hint="give another --runtime-dir"
        )
    os.chmod(path, 0o700)


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


def _start_node(config: Config, lock: int) -> _Node:
    lifeline_read, lifeline = os.pipe2(os.O_CLOEXEC)
    ready, ready_write = os.pipe2(os.O_CLOEXEC)
    command = hostd_command(config)
    command += ["--lifeline-fd", str(lifeline_read), "--ready-fd", str(ready_write)]
    command += ["--lock-fd", str(lock)]
    # A session of its own: a Ctrl-C in the terminal is for us, and we end it.
    # What a service manager wants to hear is ours to tell.
    env = {key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"}
    process = subprocess.Popen(
        command,
        env=env,
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
    import_whole(_IMPORTED_WHOLE, _NOT_IMPORTED)


def _become(account: pwd.struct_passwd | None) -> None:
    """Give root up for good. Nothing of the account's may read this process's memory: the token."""
    _import_late_modules()
    raise_limit(resource.RLIMIT_NOFILE, NOFILE)
    raise_priority()
    if account is not None and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
        os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    set_no_new_privs()
    set_dumpable(False)
    os.chdir("/")


class _Server(uvicorn.Server):
    """uvicorn, which tells a service manager how it is, and ends when a hostd of our own ends: only
    root could start that again."""

    def __init__(
        self,
        config: uvicorn.Config,
        runtime: Runtime,
        reloader: Reloader,
        node: _Node | None,
    ) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._reloader = reloader
        self._node = node
        self._manager = ServiceManager(os.environ)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        self._tell_ready()

    def _tell_ready(self) -> None:
        known = "all sandboxes are known" if self._runtime.ready else "the node is not there yet"
        self._manager.ready(f"serving; {known}")

    def _reload(self) -> None:
        self._manager.reloading()
        try:
            self._reloader.take_over(self._reloader.read())
        except ConfigError as error:
            log.error("nothing is changed: %s", error.message)  # noqa: TRY400
        self._tell_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._manager.stopping()
        self._runtime.processes.end_waits()
        self._runtime.node_events.close()  # who follows for ever would be waited for
        # Sandboxes end with a node of our own. Beside a unit they stay, and what is under way in
        # them may end. Then whoever waits hears at once why there is no result; uvicorn would
        # wait for the end, and after timeout_graceful_shutdown cut it off without a word.
        grace_s = 0.0 if self._node is not None else self._runtime.config.stop_grace_s
        self.config.timeout_graceful_shutdown = int(grace_s + END_S)
        loop = asyncio.get_running_loop()
        cut = loop.call_later(grace_s, self._runtime.cut_off)
        if grace_s == 0:
            cut.cancel()
            self._runtime.cut_off()
        await super().shutdown(sockets)
        cut.cancel()

    async def on_tick(self, counter: int) -> bool:
        self._manager.alive()
        if self._node is not None and counter % 10 == 0 and self._node.process.poll() is not None:
            log.error("the node ended; so does the daemon")
            return True
        return await super().on_tick(counter)


def _serve(
    config: Config,
    load: Callable[[], Config],
    token: str,
    listeners: list[socket.socket],
    node: _Node | None,
) -> int:
    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    runtime = Runtime(config)
    reloader = Reloader(runtime, load)
    app = create_app(config, runtime, token=token, ready_within_s=ADOPTION_S, reloader=reloader)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            loop="uvloop",
            http=bounded(most_connections(config, nofile)),
            ws="websockets-sansio",
            ws_max_size=config.port_message_bytes,
            ws_per_message_deflate=False,
            # A client whose messages are not read for a while, as the program takes none, would be
            # taken for dead; what is silent for long is ended by port_idle_s.
            ws_ping_interval=None,
            lifespan="on",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            proxy_headers=False,
        ),
        runtime,
        reloader,
        node,
    )
    # What is there by now stays. To look through it takes the collector 70 ms, in which no request
    # is answered; a full collection without it takes 4.
    gc.collect()
    gc.freeze()
    # uvicorn raises the signal again once it has ended; here ending is what was asked for.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        server.run(sockets=listeners)
    failed = not server.started or (node is not None and node.process.poll() is not None)
    return 1 if failed else 0
