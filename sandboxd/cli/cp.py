"""``sandboxd cp``: a file or a directory into a sandbox, or out of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import reporting, say
from sandboxd.client.sync import Client

Place = Annotated[
    str, typer.Argument(metavar="PATH|ID:PATH", help="ID:PATH is in a sandbox; - is our stream.")
]


def cp(
    source: Place,
    target: Place,
    *,
    user: options.User = None,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Copy a file, or the content of a directory, between here and a sandbox. A file whose target
    ends in / goes into that directory."""
    inside, outside = _split(source), _split(target)
    if (inside is None) == (outside is None):
        raise typer.BadParameter("one of the two must be ID:PATH")
    with reporting(), options.daemon(url, token_file, config) as daemon:
        try:
            if outside is not None:
                _in(daemon, source, *outside, user)
            elif inside is not None:
                _out(daemon, *inside, target, user)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None


def _in(daemon: Client, source: str, sandbox_id: str, path: str, user: str | None) -> None:
    sandbox = daemon.connect(sandbox_id)
    if source == "-":
        sandbox.write_file(path, sys.stdin.buffer.read(), user=user)
    elif Path(source).is_dir():
        sandbox.upload_dir(source, path, user=user)
    else:
        path += Path(source).name if path.endswith("/") else ""
        sandbox.upload_file(source, path, user=user)


def _out(daemon: Client, sandbox_id: str, path: str, target: str, user: str | None) -> None:
    sandbox = daemon.connect(sandbox_id)
    if target == "-":
        sys.stdout.buffer.write(sandbox.read_file(path, user=user))
        return
    if sandbox.stat(path, follow=True, user=user).is_dir:
        for name in sandbox.download_dir(path, target, user=user).skipped:
            say(f"left out: {name}")
        return
    final = Path(target)
    if target.endswith("/") or final.is_dir():
        final /= Path(path).name
    sandbox.download_file(path, final, user=user)


def _split(place: str) -> tuple[str, str] | None:
    """Sandbox and path of ``ID:PATH``; None for a place here."""
    name, colon, path = place.partition(":")
    return (name, path) if colon and path.startswith("/") and "/" not in name else None
