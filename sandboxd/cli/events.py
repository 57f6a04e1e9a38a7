"""``sandboxd events``: what became of the node's sandboxes, or of one, until now or as it comes."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import sandbox_ids
from sandboxd.cli.output import print_json, print_table, reporting
from sandboxd.client.eyes_calls import NodeEvent
from sandboxd.client.sync import Client
from sandboxd.errors import SandboxNotFound

COLUMNS = ["SEQ", "AT", "KIND", "SANDBOX", "RUN", "WHAT"]


def events(
    sandbox: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Of one sandbox only.", autocompletion=sandbox_ids),
    ] = None,
    *,
    after: Annotated[int, typer.Option(help="Those that followed this number only.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on, with what comes.")] = False,
    run: options.RunName = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Of this kind only; may be repeated.")
    ] = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Print what became of sandboxes and of the node, the oldest first.

    With ID alone these are the sandbox's own events, as long as it is there, with its own numbers;
    otherwise the node's: the last few thousand, of sandboxes that are gone too. --json prints one
    object a line where it follows.
    """
    kinds = kind or []
    with reporting(), options.daemon(url, token_file, config) as daemon:
        if sandbox is not None and not follow and not run:
            with contextlib.suppress(SandboxNotFound):  # then what the node remembers of it
                _own(daemon, sandbox, after, kinds, as_json=as_json)
                return
        found = daemon.events(after, follow=follow, run=run, sandbox=sandbox, kinds=kinds)
        if follow:
            _tell(found, as_json=as_json)
        elif as_json:
            print_json({"events": list(found)})
        else:
            print_table(COLUMNS, [_row(one) for one in found])


def _own(daemon: Client, sandbox: str, after: int, kinds: list[str], *, as_json: bool) -> None:
    own = [one for one in daemon.connect(sandbox).events(after) if not kinds or one.kind in kinds]
    if as_json:
        print_json({"events": own})
        return
    rows = [[str(one.seq), _moment(one.at), one.kind, one.message] for one in own]
    print_table(["SEQ", "AT", "KIND", "WHAT"], rows)


def _tell(found: Iterable[NodeEvent], *, as_json: bool) -> None:
    """Line by line, each at once: it may be a pipe."""
    for line in _lines(found, as_json=as_json):
        typer.echo(line)


def _lines(found: Iterable[NodeEvent], *, as_json: bool) -> Iterator[str]:
    for one in found:
        yield json.dumps(_json(one)) if as_json else "  ".join(_row(one))


def _json(one: NodeEvent) -> dict[str, Any]:
    return {
        **{name: getattr(one, name) for name in ("seq", "kind", "sandbox", "run", "message")},
        "at": _moment(one.at),
        "detail": one.detail,
    }


def _row(one: NodeEvent) -> list[str]:
    """On one line, whatever a name in it holds."""
    words = (one.kind, one.sandbox or "-", one.run or "-", one.message)
    return [str(one.seq), _moment(one.at), *(_printable(word) for word in words)]


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _moment(at: datetime.datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
