"""``sandboxd ps`` and ``logs``: the background processes of a sandbox, and what they wrote."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from sandboxd.cli import ls, options
from sandboxd.cli.completion import sandbox_ids
from sandboxd.cli.output import age, print_json, print_output, print_table, reporting, say
from sandboxd.client import process_calls
from sandboxd.client.process_calls import Follow, ProcessInfo


def ps(
    sandbox: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="Of a sandbox; all of them if left out.",
            autocompletion=sandbox_ids,
        ),
    ] = None,
    *,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """List the background processes of a sandbox; without one, the sandboxes."""
    if sandbox is None:
        ls.ls(as_json=as_json, url=url, token_file=token_file, config=config)
        return
    with reporting(), options.daemon(url, token_file, config) as daemon:
        found = daemon.do(process_calls.list_all(sandbox))
    if as_json:
        print_json({"processes": found})
        return
    now = datetime.datetime.now(datetime.UTC)
    rows = [_row(process, now) for process in found]
    print_table(["ID", "STATE", "EXIT", "PID", "AGE", "NAME", "COMMAND"], rows)


def _row(process: ProcessInfo, now: datetime.datetime) -> list[str]:
    command = process.command
    return [
        process.id,
        process.state,
        "-" if process.exit_code is None else str(process.exit_code),
        str(process.pid),
        age(process.started_at, now),
        process.name or "-",
        " ".join((command if isinstance(command, str) else " ".join(command)).split()),
    ]


def logs(
    sandbox: options.SandboxId,
    process: Annotated[str, typer.Argument(metavar="PROCESS", help="Its ID, as ps tells it.")],
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the process has ended.")
    ] = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Print what a background process has written, stdout and stderr each to ours."""
    reader = Follow(sandbox, process)
    with reporting(), options.daemon(url, token_file, config) as daemon:
        while not reader.ended:
            outputs = reader.take(daemon.do(reader.call() if follow else reader.call(0.0)))
            for output in outputs:
                print_output(output)
            if not outputs and not follow:
                break
    if reader.lost_bytes:
        say(f"{reader.lost_bytes} bytes were written that are not kept any more")
