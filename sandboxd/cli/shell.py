"""``sandboxd shell ID``: a terminal in a sandbox."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator

import typer

from sandboxd.cli import options
from sandboxd.cli.output import EXIT_NOT_RUN, complain, reporting
from sandboxd.client.process_calls import ProcessOptions
from sandboxd.client.sync import Client
from sandboxd.client.sync_process import Process
from sandboxd.errors import SandboxdError

SCRIPT = "if command -v bash > /dev/null; then exec bash -il; else exec sh -il; fi"
READ_BYTES = 65536


def shell(
    sandbox: options.SandboxId,
    *,
    cwd: options.Cwd = None,
    user: options.User = None,
    env: options.Env = None,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Open a login shell on a terminal of its own; its exit status is ours."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise typer.BadParameter("stdin and stdout must be a terminal; use exec -i otherwise")
    how = options.exec_options(timeout_s=None, cwd=cwd, user=user, env=env, stdin=False)
    inside = {"TERM": os.environ.get("TERM", "xterm"), **how.get("env", {})}
    begin: ProcessOptions = {"env": inside, "name": "shell"}
    if cwd is not None:
        begin["cwd"] = cwd
    if user is not None:
        begin["user"] = user
    with reporting(EXIT_NOT_RUN), options.daemon(url, token_file, config) as daemon:
        status = attached(daemon, sandbox, begin)
    raise typer.Exit(status)


def attached(daemon: Client, sandbox: str, how: ProcessOptions) -> int:
    """Start the shell, pass bytes both ways until it ends, and take it away."""
    cols, rows = os.get_terminal_size()
    box = daemon.connect(sandbox)
    size = {"cols": cols, "rows": rows}
    process = box.start_process(SCRIPT, **(how | {"tty": size}))
    ended_read, ended = os.pipe()
    try:
        writer = threading.Thread(target=_output, args=(process, ended))
        with _raw(), _following_size(process):
            writer.start()
            _input(process, ended_read)
            writer.join()
        code = process.refresh().exit_code
        return EXIT_NOT_RUN if code is None else code
    finally:
        with contextlib.suppress(SandboxdError):
            process.remove()
        os.close(ended_read)


def _output(process: Process, ended: int) -> None:
    try:
        for output in process.output():
            data = memoryview(output.data)
            while data:
                data = data[os.write(sys.stdout.fileno(), data) :]
    except SandboxdError as error:
        complain(error)
    finally:
        os.close(ended)  # wakes who waits for a key


def _input(process: Process, ended: int) -> None:
    """Keys to the shell, until it has ended (``ended`` is readable then) or takes no more."""
    keys = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([keys, ended], [], [])
        if ended in ready:
            return
        data = os.read(keys, READ_BYTES)
        try:
            process.write(data or b"\x04")
        except SandboxdError:  # it has just ended, or says why through its output
            return
        if not data:
            return


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Keys as they are typed: what Ctrl-C means is for the terminal inside to say."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setraw(keys, termios.TCSADRAIN)  # what was typed already is not lost
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _following_size(process: Process) -> Iterator[None]:
    def resize(*_: object) -> None:
        with contextlib.suppress(SandboxdError, OSError):
            process.resize(*os.get_terminal_size())

    before = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
