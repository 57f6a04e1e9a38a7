"""``sandboxd run IMAGE -- COMMAND``: one command in a sandbox of its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import image_names
from sandboxd.cli.exec_ import streamed, terminating, whole
from sandboxd.cli.output import EXIT_NOT_RUN, complain, print_json, reporting, say
from sandboxd.client.calls import CreateOptions
from sandboxd.client.results import ExecExit
from sandboxd.client.sync import Client, Sandbox
from sandboxd.errors import SandboxdError

SNAPSHOT = "sn-"


def run(
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE",
            help="Name of an image of the node, or the ID of a snapshot (sn-…).",
            autocompletion=image_names,
        ),
    ],
    command: options.Command,
    *,
    cpus: Annotated[float | None, typer.Option(help="Limit.")] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Limit.")] = None,
    disk_mb: Annotated[int | None, typer.Option(help="Limit of what it may write.")] = None,
    pids: Annotated[int | None, typer.Option(help="Limit.")] = None,
    cpuset: Annotated[
        str | None, typer.Option(metavar="LIST", help="Run on these CPUs, as in 0-3,8.")
    ] = None,
    cpu_weight: Annotated[
        int | None, typer.Option(help="Against other sandboxes; they have 100.")
    ] = None,
    io_read_bps: Annotated[int | None, typer.Option(help="Limit of its disk, if any.")] = None,
    io_write_bps: Annotated[int | None, typer.Option(help="Limit of its disk, if any.")] = None,
    io_read_iops: Annotated[int | None, typer.Option(help="Limit of its disk, if any.")] = None,
    io_write_iops: Annotated[int | None, typer.Option(help="Limit of its disk, if any.")] = None,
    copy_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID:PATH",
            help="With this file or directory of another sandbox; may be repeated.",
        ),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SRC:DST[:rw]",
            help="With this file or directory of the node, below its mount_roots; may be repeated.",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not delete the sandbox; its ID is told on stderr.")
    ] = False,
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
    """Create a sandbox, run a command in it and delete it; the command's exit status is ours."""
    words = options.command_words(command)
    how = options.exec_options(timeout_s=timeout, cwd=cwd, user=user, env=env, stdin=stdin)
    given: dict[str, float | str | None] = {
        "cpus": cpus,
        "memory_mb": memory_mb,
        "disk_mb": disk_mb,
        "pids": pids,
        "cpuset": cpuset,
        "cpu_weight": cpu_weight,
        "io_read_bps": io_read_bps,
        "io_write_bps": io_write_bps,
        "io_read_iops": io_read_iops,
        "io_write_iops": io_write_iops,
    }
    limits = {name: value for name, value in given.items() if value is not None}
    like: CreateOptions = {"limits": limits} if limits else {}
    if copy_from:
        like["copy_from"] = _copy_from(copy_from)
    if mount:
        like["mounts"] = [_mount(one) for one in mount]
    end: ExecExit
    with (
        reporting(EXIT_NOT_RUN),
        options.daemon(url, token_file, config) as daemon,
        terminating(),
    ):
        make = daemon.fork if image.startswith(SNAPSHOT) else daemon.create
        created = make(image, **like)
        try:
            if as_json:
                end = whole(daemon, created.id, words, how)
            else:
                end = streamed(daemon, created.id, words, how)
        except BaseException:
            # However this ends, an interrupt included; the first error is the one to tell of.
            _end(daemon, created, keep)
            raise
        deleted = _end(daemon, created, keep)
    if as_json:
        print_json({"sandbox": created.info, "result": end})
    raise typer.Exit(end.exit_code if deleted else EXIT_NOT_RUN)


def _copy_from(given: list[str]) -> dict[str, Any]:
    pairs = [one.partition(":") for one in given]
    sandboxes = {sandbox for sandbox, _, _ in pairs}
    if len(sandboxes) != 1 or not all(path for _, _, path in pairs):
        raise typer.BadParameter("it takes ID:PATH, of one sandbox", param_hint="--copy-from")
    return {"sandbox": sandboxes.pop(), "paths": [path for _, _, path in pairs]}


def _mount(given: str) -> dict[str, Any]:
    source, _, rest = given.partition(":")
    target, _, how = rest.partition(":")
    if not source or not target or how not in ("", "ro", "rw"):
        raise typer.BadParameter(f"{given!r} is not SRC:DST[:rw]", param_hint="--mount")
    return {"source": source, "target": target, "read_only": how != "rw"}


def _end(daemon: Client, created: Sandbox, keep: bool) -> bool:
    if keep:
        say(f"kept {created.id}")
        return True
    try:
        daemon.delete(created.id)
    except SandboxdError as error:
        complain(error)
        return False
    return True
