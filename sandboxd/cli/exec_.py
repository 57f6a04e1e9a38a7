"""``sandboxd exec ID -- COMMAND``: run a command in a sandbox that is there."""

from __future__ import annotations

from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import EXIT_NOT_RUN, print_json, print_result, reporting


def exec_(
    sandbox: Annotated[str, typer.Argument(metavar="ID", help="Of the sandbox.")],
    command: options.Command,
    *,
    timeout: options.Timeout = None,
    cwd: options.Cwd = None,
    user: options.User = None,
    env: options.Env = None,
    stdin: options.Stdin = False,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Run a command in a sandbox; its exit status is ours."""
    body = options.command_body(
        command, timeout_s=timeout, cwd=cwd, user=user, env=env, stdin=stdin
    )
    with reporting(EXIT_NOT_RUN), options.daemon(url, token_file, config) as daemon:
        result = daemon.execute(sandbox, body)
    if as_json:
        print_json(result)
    else:
        print_result(result)
    raise typer.Exit(result["exit_code"])
