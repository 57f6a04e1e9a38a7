"""How the program speaks: JSON, tables, one-line errors, and a command's own output."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

from sandboxd.cli.http import DaemonError
from sandboxd.errors import SandboxdError

EXIT_FAILED: Final = 1
EXIT_NOT_RUN: Final = 125
"""The command did not run, or what became of it is not known."""


@contextlib.contextmanager
def reporting(exit_status: int = EXIT_FAILED) -> Iterator[None]:
    """Turn our errors into one line on stderr and ``exit_status``; an interrupt into 130."""
    try:
        yield
    except (DaemonError, SandboxdError) as error:
        complain(error)
        raise typer.Exit(exit_status) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def complain(error: DaemonError | SandboxdError) -> None:
    hint = f" (hint: {error.hint})" if error.hint else ""
    say(f"{error.code}: {error.message}{hint}")


def say(text: str) -> None:
    """A remark, on stderr and on one line whatever it quotes."""
    typer.echo(f"sandboxd: {' '.join(text.split())}", err=True)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


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


def print_result(result: dict[str, Any]) -> None:
    """A command's output where it belongs, byte for byte, and what is to be known beside it."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        stream.flush()
        data = decoded(result, name)
        buffer = getattr(stream, "buffer", None)
        if buffer is None:
            stream.write(data.decode(errors="replace"))
        else:
            buffer.write(data)
        stream.flush()
        if result.get(f"{name}_truncated"):
            total = result[f"{name}_total_bytes"]
            say(f"{name}: {len(data)} of {total} bytes were kept")
    if result.get("timed_out"):
        say("the time was up: all of the command's processes were killed")
    if result.get("oom_killed"):
        say("the sandbox ran out of memory while the command ran")


def decoded(result: dict[str, Any], name: str) -> bytes:
    text: str = result[name]
    return base64.b64decode(text) if result.get("encoding") == "base64" else text.encode()
