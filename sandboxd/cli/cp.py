"""``sandboxd cp``: a file or a directory into a sandbox, or out of one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import print_json, reporting, say
from sandboxd.client.sync import Client

Place = Annotated[
    str, typer.Argument(metavar="PATH|ID:PATH", help="ID:PATH is in a sandbox; - is our stream.")
]


def cp(
    source: Place,
    target: Place,
    *,
    user: options.User = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Copy a file, or the content of a directory, between here and a sandbox. A file whose target
    ends in / goes into that directory. JSON says what was copied, and what could not be."""
    inside, outside = _split(source), _split(target)
    if (inside is None) == (outside is None):
        raise typer.BadParameter("one of the two must be ID:PATH")
    with reporting(), options.daemon(url, token_file, config) as daemon:
        try:
            if outside is not None:
                copied = _in(daemon, source, *outside, user)
            else:
                assert inside is not None
                copied = _out(daemon, *inside, target, user)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
    if as_json and target != "-":
        print_json(copied)
    else:
        for name in copied.skipped:
            say(f"left out: {name}")


@dataclass(frozen=True)
class _Copied:
    """``size_bytes`` of a file, ``members`` of a directory."""

    target: str
    size_bytes: int | None = None
    members: int | None = None
    skipped: list[str] = field(default_factory=list)


def _in(daemon: Client, source: str, sandbox_id: str, path: str, user: str | None) -> _Copied:
    sandbox = daemon.connect(sandbox_id)
    if source == "-":
        info = sandbox.write_file(path, sys.stdin.buffer.read(), user=user)
    elif Path(source).is_dir():
        return _Copied(path, members=sandbox.upload_dir(source, path, user=user))
    else:
        path += Path(source).name if path.endswith("/") else ""
        info = sandbox.upload_file(source, path, user=user)
    return _Copied(path, size_bytes=info.size_bytes)


def _out(daemon: Client, sandbox_id: str, path: str, target: str, user: str | None) -> _Copied:
    sandbox = daemon.connect(sandbox_id)
    if target == "-":
        data = sandbox.read_file(path, user=user)
        sys.stdout.buffer.write(data)
        return _Copied(target, size_bytes=len(data))
    if sandbox.stat(path, follow=True, user=user).is_dir:
        tree = sandbox.download_dir(path, target, user=user)
        return _Copied(target, members=tree.members, skipped=tree.skipped)
    final = Path(target)
    if target.endswith("/") or final.is_dir():
        final /= Path(path).name
    return _Copied(str(final), size_bytes=sandbox.download_file(path, final, user=user))


def _split(place: str) -> tuple[str, str] | None:
    """Sandbox and path of ``ID:PATH``; None for a place here."""
    name, colon, path = place.partition(":")
    return (name, path) if colon and path.startswith("/") and "/" not in name else None
