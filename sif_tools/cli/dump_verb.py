"""`sif-tools dump FILE ID`: the bytes of one data object."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from sif_tools.errors import BadSif, NoSuchObject, WriteFailed
from sif_tools.reader import opened, pread, read_sif

_STEP_BYTES: Final = 4 << 20


def register(app: typer.Typer) -> None:
    app.command("dump")(dump_command)


def dump_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a SIF file")],
    object_id: Annotated[int, typer.Argument(metavar="ID", help="as `list` shows it")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write there [default: stdout]")
    ] = None,
) -> None:
    """Write the bytes of a data object of a SIF file."""
    with opened(file) as fd:
        found = [one for one in read_sif(fd).descriptors if one.object_id == object_id]
        if not found:
            raise NoSuchObject(f"there is no object {object_id}")
        try:
            sink = output.open("xb") if output is not None else sys.stdout.buffer
            with sink:
                at, end = found[0].offset_bytes, found[0].offset_bytes + found[0].size_bytes
                while at < end:
                    data = pread(fd, min(_STEP_BYTES, end - at), at)
                    if not data:
                        raise BadSif("the file became shorter while it was read")
                    sink.write(data)
                    at += len(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise WriteFailed(f"{output or 'stdout'}: {error.strerror}") from error
