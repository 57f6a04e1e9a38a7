"""How the program speaks: JSON, tables, one-line errors, and a command's own output."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Final

import typer
from rich.console import Console
from rich.table import Table

from sandboxd.client.results import ExecExit, ExecResult, Output
from sandboxd.errors import SandboxdError

EXIT_FAILED: Final = 1
EXIT_NOT_RUN: Final = 125
"""The command did not run, or what became of it is not known."""


@contextlib.contextmanager
def reporting(exit_status: int = EXIT_FAILED) -> Iterator[None]:
    """Turn our errors into one line on stderr and ``exit_status``; an interrupt into 130."""
    try:
        yield
    except SandboxdError as error:
        complain(error)
        raise typer.Exit(exit_status) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def complain(error: SandboxdError) -> None:
    hint = f" (hint: {error.hint})" if error.hint else ""
    say(f"{error.code}: {error.message}{hint}")


def failures_json(failed: Mapping[str, SandboxdError]) -> list[dict[str, object]]:
    """What could not be done, and why, by what it was about."""
    return [{"id": one, "error": error} for one, error in failed.items()]


def say(text: str) -> None:
    """A remark, on stderr and on one line whatever it quotes."""
    typer.echo(f"sandboxd: {' '.join(text.split())}", err=True)


def print_json(value: object) -> None:
    typer.echo(as_json(value))


def as_json(value: object) -> str:
    return json.dumps(value, indent=2, default=_plain)


def _plain(value: object) -> object:
    """What JSON has no word for, in the API's own spelling."""
    if isinstance(value, SandboxdError):
        names = ("code", "message", "cause", "retryable", "hint", "detail")
        return {name: getattr(value, name) for name in names}
    if isinstance(value, ExecResult):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        for name in ("stdout", "stderr"):
            fields[name] = base64.b64encode(fields.pop(f"{name}_bytes")).decode()
        return fields | {"encoding": "base64"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, datetime.datetime):
        return value.isoformat().replace("+00:00", "Z")
    raise TypeError(f"{type(value).__name__} is no JSON")


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A table without wrapping: a line that is cut in two is no use to grep."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(table, crop=False)


def print_output(output: Output) -> None:
    """A piece of a command's output where it belongs, byte for byte."""
    stream = sys.stdout if output.stream == "stdout" else sys.stderr
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(output.data.decode(errors="replace"))
    else:
        buffer.write(output.data)
    stream.flush()


def remark(end: ExecExit) -> None:
    """What is to be known beside the exit status."""
    if end.timed_out:
        say("the time was up: all of the command's processes were killed")
    if end.oom_killed:
        say("the sandbox ran out of memory while the command ran")


def age(since: datetime.datetime, now: datetime.datetime) -> str:
    """Time since then in one or two units: ``3m12s``."""
    seconds = max(0, int((now - since).total_seconds()))
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // lower_size}{lower}"
    return f"{seconds // 60}m{seconds % 60}s" if seconds >= 60 else f"{seconds}s"


def mebibytes(size_bytes: float | None) -> str:
    """``12.3M``; ``-`` where it is not known."""
    return "-" if size_bytes is None else f"{size_bytes / (1 << 20):.1f}M"
