"""``sandboxd exec ID -- COMMAND``: run a command in a sandbox that is there."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, Any

import typer

from sandboxd.cli import options
from sandboxd.cli.output import EXIT_NOT_RUN, print_json, print_output, remark, reporting
from sandboxd.client import calls, process_calls
from sandboxd.client.calls import ExecOptions
from sandboxd.client.frames import FrameReader
from sandboxd.client.process_calls import ProcessOptions
from sandboxd.client.results import ExecExit, ExecResult
from sandboxd.client.sync import Client
from sandboxd.client.sync_stream import ExecStream
from sandboxd.errors import SandboxdError
from sandboxd.model import Exclusive


def exec_(
    sandbox: options.SandboxId,
    command: options.Command,
    *,
    timeout: options.Timeout = None,
    cwd: options.Cwd = None,
    user: options.User = None,
    env: options.Env = None,
    stdin: options.Stdin = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Start it in the background, and print its ID."),
    ] = False,
    exclusive: Annotated[
        Exclusive | None,
        typer.Option(help="Run it with all other processes of the sandbox killed, or frozen."),
    ] = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Run a command in a sandbox; its output comes as it is written, its exit status is ours. An
    interrupt kills it."""
    words = options.command_words(command)
    how = options.exec_options(
        timeout_s=timeout, cwd=cwd, user=user, env=env, stdin=stdin, exclusive=exclusive
    )
    if detach:
        if timeout is not None or stdin or exclusive:
            raise typer.BadParameter(
                "a process in the background takes no --timeout, --stdin or --exclusive"
            )
        with reporting(EXIT_NOT_RUN), options.daemon(url, token_file, config) as daemon:
            process = daemon.do(process_calls.start(sandbox, words, _background(how)))
        print_json(process) if as_json else typer.echo(process.id)
        return
    end: ExecExit
    with (
        reporting(EXIT_NOT_RUN),
        options.daemon(url, token_file, config) as daemon,
        terminating(),
    ):
        if as_json:
            end = whole(daemon, sandbox, words, how)
            print_json(end)
        else:
            end = streamed(daemon, sandbox, words, how)
    raise typer.Exit(end.exit_code)


def _background(how: ExecOptions) -> ProcessOptions:
    same: Any = {name: value for name, value in how.items() if name in ("cwd", "env", "user")}
    chosen: ProcessOptions = same
    return chosen


def whole(daemon: Client, sandbox: str, command: list[str], how: ExecOptions) -> ExecResult:
    """Run a command, and be told all at its end."""
    exec_id = calls.new_exec_id()
    with _killed_on_interrupt(daemon, sandbox, exec_id):
        return daemon.do(calls.execute(sandbox, command, {**how, "exec_id": exec_id}))


def streamed(daemon: Client, sandbox: str, command: list[str], how: ExecOptions) -> ExecExit:
    """Run a command, its output being ours while it runs."""
    exec_id = calls.new_exec_id()
    call = calls.execute_stream(sandbox, command, how, exec_id)
    with (
        _killed_on_interrupt(daemon, sandbox, exec_id),
        ExecStream(daemon, sandbox, call, FrameReader(exec_id)) as stream,
    ):
        for output in stream:
            print_output(output)
        end = stream.exit
    remark(end)
    return end


@contextlib.contextmanager
def _killed_on_interrupt(daemon: Client, sandbox: str, exec_id: str) -> Iterator[None]:
    """When we are told to end, the command ends first; a second interrupt does not wait for it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(SandboxdError):  # what is gone cannot be killed
            daemon.do(calls.kill_exec(sandbox, exec_id))
        raise


@contextlib.contextmanager
def terminating() -> Iterator[None]:
    """SIGTERM unwinds the program, as SIGINT does already, so that nothing is left behind."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
