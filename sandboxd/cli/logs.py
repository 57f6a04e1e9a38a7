"""``sandboxd ps``, ``logs`` and ``kill``: the background processes of a sandbox."""

from __future__ import annotations

import base64
import datetime
from typing import Annotated

import typer

from sandboxd.cli import ls, options
from sandboxd.cli.completion import process_ids, sandbox_ids
from sandboxd.cli.output import age, print_json, print_output, print_table, reporting, say
from sandboxd.client import process_calls
from sandboxd.client.process_calls import Follow, ProcessInfo, ProcessNews


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


Process = Annotated[
    str,
    typer.Argument(metavar="PROCESS", help="Its ID, as ps tells it.", autocompletion=process_ids),
]


def logs(
    sandbox: options.SandboxId,
    process: Process,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the process has ended.")
    ] = False,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Print what a background process has written, stdout and stderr each to ours. As JSON: the
    process, and both as base64."""
    reader = Follow(sandbox, process)
    gathered = {"stdout": bytearray(), "stderr": bytearray()}
    told: ProcessNews | None = None
    with reporting(), options.daemon(url, token_file, config) as daemon:
        while not reader.ended:
            told = daemon.do(reader.call() if follow else reader.call(0.0))
            outputs = reader.take(told)
            for output in outputs:
                if as_json:
                    gathered[output.stream] += output.data
                else:
                    print_output(output)
            if not outputs and not follow:
                break
    if as_json and told is not None:
        both = {name: base64.b64encode(data).decode() for name, data in gathered.items()}
        whole = {"process": told.info, **both, "encoding": "base64"}
        print_json({**whole, "lost_bytes": reader.lost_bytes})
    elif reader.lost_bytes:
        say(f"{reader.lost_bytes} bytes were written that are not kept any more")


def kill(
    sandbox: options.SandboxId,
    process: Process,
    *,
    signal: Annotated[str, typer.Option("--signal", "-s", help="Number or name.")] = "KILL",
    tree: Annotated[
        bool, typer.Option("--tree", help="Every process it has started, too.")
    ] = False,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Send a signal to a background process."""
    number = int(signal) if signal.isdecimal() else signal
    with reporting(), options.daemon(url, token_file, config) as daemon:
        daemon.do(process_calls.send_signal(sandbox, process, number, tree))
    if as_json:
        print_json({"process": process, "signal": number, "tree": tree})
