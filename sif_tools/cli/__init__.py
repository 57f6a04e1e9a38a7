"""The `sif-tools` command. One verb a file; here only the application and how errors are told.

A failure is one line on stderr (`error: CODE: message`, with a `hint:` line where there is one)
and exit status 1; usage errors are 2. With `--json`, stdout carries JSON and nothing else.
"""

from __future__ import annotations

import io
import sys

import typer

from sif_tools.cli import (
    convert_verb,
    dump_verb,
    edit_verbs,
    flatten_verb,
    gc_verb,
    inspect_verb,
    list_verb,
    report_verb,
    sign_verb,
    sync_check_verb,
    verify_verb,
)
from sif_tools.cli.output import safe_text
from sif_tools.errors import SifError


def create_app() -> typer.Typer:
    """The application with its verbs."""
    app = typer.Typer(
        name="sif-tools",
        help="Make SIF files from container images, and look into them.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for verb in (
        convert_verb,
        dump_verb,
        edit_verbs,
        flatten_verb,
        gc_verb,
        inspect_verb,
        list_verb,
        report_verb,
        sign_verb,
        sync_check_verb,
        verify_verb,
    ):
        verb.register(app)
    return app


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        # Names of files and of what is in images fit into no locale for sure.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        create_app()()
    except SifError as error:
        print(f"error: {error.code}: {safe_text(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {safe_text(error.hint)}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # `sif-tools list … | head`: nobody listens any more, which is no failure of ours.
        sys.stderr.close()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
