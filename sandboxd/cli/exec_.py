"""``sandboxd exec ID -- COMMAND``: run a command in a sandbox that is there."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandboxd.cli import options
from sandboxd.cli.output import EXIT_NOT_RUN, print_json, print_output, remark, reporting
from sandboxd.client import calls, process_calls
from sandboxd.client.calls import ExecOptions
from sandboxd.client.frames import FrameReader
from sandboxd.client.process_calls import ProcessOptions
from sandboxd.client.results import ExecExit
from sandboxd.client.sync import Client
from sandboxd.client.sync_stream import ExecStream


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
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Run a command in a sandbox; its output comes as it is written, its exit status is ours."""
    words = options.command_words(command)
    how = options.exec_options(timeout_s=timeout, cwd=cwd, user=user, env=env, stdin=stdin)
    if detach:
        if timeout is not None or stdin:
            raise typer.BadParameter("a process in the background takes no --timeout or --stdin")
        with reporting(EXIT_NOT_RUN), options.daemon(url, token_file, config) as daemon:
            process = daemon.do(process_calls.start(sandbox, words, _background(how)))
        print_json(process) if as_json else typer.echo(process.id)
        return
    end: ExecExit
    with reporting(EXIT_NOT_RUN), options.daemon(url, token_file, config) as daemon:
        if as_json:
            end = daemon.do(calls.execute(sandbox, words, how))
            print_json(end)
        else:
            end = streamed(daemon, sandbox, words, how)
    raise typer.Exit(end.exit_code)


def _background(how: ExecOptions) -> ProcessOptions:
    same: Any = {name: value for name, value in how.items() if name in ("cwd", "env", "user")}
    chosen: ProcessOptions = same
    return chosen


def streamed(daemon: Client, sandbox: str, command: list[str], how: ExecOptions) -> ExecExit:
    """Run a command, its output being ours while it runs."""
    call = calls.execute_stream(sandbox, command, how)
    with ExecStream(daemon, sandbox, call, FrameReader()) as stream:
        for output in stream:
            print_output(output)
        end = stream.exit
    remark(end)
    return end
